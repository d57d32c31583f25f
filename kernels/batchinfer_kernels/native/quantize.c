/* Rows of activations to bytes, with the RMS norm that stands before them; int8.py says how these are called. */

#include <math.h>

#include "layers.h"

enum { ROWS_AT_A_TIME = 4 };

void batchinfer_quantize_row(const float *x, long width, const struct quantized *to, long t)
{
    const long groups = groups_of(width), padded = padded_to_blocks(width);
    for (long g = 0; g < groups; g++) {
        __m512 values[GROUP_REGISTERS];
        load_registers(x + g * GROUP, width - g * GROUP, GROUP_REGISTERS, values);
        store_group(values, to, t, g, padded);
    }
}

/* A row's squares are summed lane by lane, the lanes in the end. */
void batchinfer_rms_norm_row(const float *x, const float *weight, float eps, long width, const struct quantized *to,
                             long t)
{
    const long groups = groups_of(width), padded = padded_to_blocks(width);
    __m512 values[GROUP_REGISTERS], weights[GROUP_REGISTERS], squares[GROUP_REGISTERS];
    for (int i = 0; i < GROUP_REGISTERS; i++)
        squares[i] = _mm512_setzero_ps();
    for (long g = 0; g < groups; g++) {
        load_registers(x + g * GROUP, width - g * GROUP, GROUP_REGISTERS, values);
        for (int i = 0; i < GROUP_REGISTERS; i++)
            squares[i] = _mm512_fmadd_ps(values[i], values[i], squares[i]);
    }
    for (int i = GROUP_REGISTERS / 2; i; i /= 2)
        for (int j = 0; j < i; j++)
            squares[j] = _mm512_add_ps(squares[j], squares[j + i]);
    const __m512 inverse = _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(squares[0]) / (float)width + eps));
    for (long g = 0; g < groups; g++) {
        load_registers(x + g * GROUP, width - g * GROUP, GROUP_REGISTERS, values);
        load_registers(weight + g * GROUP, width - g * GROUP, GROUP_REGISTERS, weights);
        for (int i = 0; i < GROUP_REGISTERS; i++)
            values[i] = _mm512_mul_ps(_mm512_mul_ps(values[i], inverse), weights[i]);
        store_group(values, to, t, g, padded);
    }
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
