/* Rows of activations to bytes, with the RMS norm that stands before them; int8.py says how these are called. */

#include <math.h>

#include "layers.h"

enum { ROWS_AT_A_TIME = 4 };

void batchinfer_quantize_row(const float *x, long width, const struct quantized *to, long t)
{
    quantize_groups(x, NULL, 1.0f, width, width, 0, groups_of(width), to, t);
}

/* A row's squares are summed lane by lane, the lanes in the end. */
void batchinfer_rms_norm_row(const float *x, const float *weight, float eps, long width, const struct quantized *to,
                             long t)
{
    enum { LANES = 8 };
    __m512 squares[LANES];
    for (int i = 0; i < LANES; i++)
        squares[i] = _mm512_setzero_ps();
    for (long at = 0; at < width; at += 2 * TURNED) {
        __m512 values[LANES];
        load_block(x + at, width - at, values);
        load_block(x + at + TURNED, width - at - TURNED, values + BLOCK_REGISTERS);
        for (int i = 0; i < LANES; i++)
            squares[i] = _mm512_fmadd_ps(values[i], values[i], squares[i]);
    }
    for (int i = LANES / 2; i; i /= 2)
        for (int j = 0; j < i; j++)
            squares[j] = _mm512_add_ps(squares[j], squares[j + i]);
    const float inverse = 1.0f / sqrtf(_mm512_reduce_add_ps(squares[0]) / (float)width + eps);
    quantize_groups(x, weight, inverse, width, width, 0, groups_of(width), to, t);
}

/* x: [rows, width] floats. */
void batchinfer_quantize(const float *x, long rows, long width, const struct quantized *to, int threads)
{
#pragma omp parallel for schedule(dynamic, ROWS_AT_A_TIME) num_threads(threads) if (rows > ROWS_AT_A_TIME)
    for (long t = 0; t < rows; t++)
        batchinfer_quantize_row(x + t * width, width, to, t);
}

/* The same behind an RMS norm. */
void batchinfer_rms_norm_quantize(const float *x, const float *weight, float eps, long rows, long width,
                                  const struct quantized *to, int threads)
{
#pragma omp parallel for schedule(dynamic, ROWS_AT_A_TIME) num_threads(threads) if (rows > ROWS_AT_A_TIME)
    for (long t = 0; t < rows; t++)
        batchinfer_rms_norm_row(x + t * width, weight, eps, width, to, t);
}
