/* Linear layers over activations in bytes; int8.py says how these are called and how weights are packed.
 *
 * Weights lie in panels of PANEL output features, so that a register holds what one instruction multiplies:
 *   bytes      [panels][width / 4][2][16][4]  with scales [panels][groups][PANEL] and, of the same shape, minus the sum
 *              of a group's bytes, which the zeros of the activations are multiplied by
 *   bfloat16   [panels][width / 2][2][16][2]
 * Sums of bytes are exact. All else is one chain of operations for each output number, in the order of k, whatever
 * the number of rows: rows are worked on ROWS at a time only because that many sums fit in registers.
 */

#include <math.h>
#include <omp.h>
#include <stddef.h>
#include <string.h>

#include "quantize.h"

enum { ROWS = 6, PANEL = 32, ROW_BLOCK = 192, PANELS_PER_GROUP = GROUP / 16 };

struct packed {
    const int8_t *values;
    const float *scales;
    const int32_t *offsets;
    const uint16_t *plain;
    long width;          /* of a row of activations, padded to a multiple of GROUP */
    long num_values;     /* output features that are kept as bytes */
    long num_plain;      /* and, behind them, as bfloat16 */
};

INLINE int32_t four_bytes(const void *at)
{
    int32_t word;
    memcpy(&word, at, 4);
    return word;
}

/* ---- One panel's columns for up to ROWS rows ---- */

INLINE void multiply_bytes(const int rows, const struct quantized *x, long t, const struct packed *w, long panel,
                           __m512 result[ROWS][2])
{
    __m512 sum[ROWS][2]; /* registers, which the result, in memory, is not */
    const long groups = w->width / GROUP;
    const uint8_t *values = x->values + t * w->width;
    const float *scales = x->scales + t * groups;
    const int32_t *zeros = x->zeros + t * groups;
    const int8_t *weights = w->values + panel * w->width * PANEL;
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
        sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    for (long g = 0; g < groups; g++) {
        const long side = (panel * groups + g) * PANEL;
        __m512i whole[ROWS][2];
        const __m512i offset0 = _mm512_loadu_si512(w->offsets + side);
        const __m512i offset1 = _mm512_loadu_si512(w->offsets + side + 16);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            /* Both factors fit 16 bits, and a zero has nothing in its upper half. */
            const __m512i zero = _mm512_set1_epi32(zeros[r * groups + g]);
            whole[r][0] = _mm512_madd_epi16(zero, offset0);
            whole[r][1] = _mm512_madd_epi16(zero, offset1);
        }
        const uint8_t *from = values + g * GROUP;
        for (int k = 0; k < GROUP; k += 4) {
            const __m512i weight0 = _mm512_loadu_si512(weights), weight1 = _mm512_loadu_si512(weights + 64);
            weights += 4 * PANEL;
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                const __m512i four = _mm512_set1_epi32(four_bytes(from + r * w->width + k));
                whole[r][0] = _mm512_dpbusd_epi32(whole[r][0], four, weight0);
                whole[r][1] = _mm512_dpbusd_epi32(whole[r][1], four, weight1);
            }
        }
        const __m512 scale0 = _mm512_loadu_ps(w->scales + side), scale1 = _mm512_loadu_ps(w->scales + side + 16);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            const __m512 scale = _mm512_set1_ps(scales[r * groups + g]);
            sum[r][0] = _mm512_fmadd_ps(scale, _mm512_mul_ps(_mm512_cvtepi32_ps(whole[r][0]), scale0), sum[r][0]);
            sum[r][1] = _mm512_fmadd_ps(scale, _mm512_mul_ps(_mm512_cvtepi32_ps(whole[r][1]), scale1), sum[r][1]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        result[r][0] = sum[r][0];
        result[r][1] = sum[r][1];
    }
}

INLINE void multiply_plain(const int rows, const struct quantized *x, long t, const struct packed *w, long panel,
                           __m512 result[ROWS][2])
{
    __m512 sum[ROWS][2]; /* registers, which the result, in memory, is not */
    const uint16_t *values = x->plain + t * w->width;
    const uint16_t *weights = w->plain + panel * w->width * PANEL;
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
        sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    for (long k = 0; k < w->width; k += 2) {
        const __m512i weight0 = _mm512_loadu_si512(weights), weight1 = _mm512_loadu_si512(weights + 32);
        weights += 2 * PANEL;
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            const __m512i two = _mm512_set1_epi32(four_bytes(values + r * w->width + k));
            sum[r][0] = dot_pairs(sum[r][0], two, weight0);
            sum[r][1] = dot_pairs(sum[r][1], two, weight1);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        result[r][0] = sum[r][0];
        result[r][1] = sum[r][1];
    }
}

/* `multiply` with a number of rows that the compiler knows. */
#define FOR_ROWS(multiply, rows, ...)                 \
    switch (rows) {                                   \
    case 1: multiply(1, __VA_ARGS__); break;          \
    case 2: multiply(2, __VA_ARGS__); break;          \
    case 3: multiply(3, __VA_ARGS__); break;          \
    case 4: multiply(4, __VA_ARGS__); break;          \
    case 5: multiply(5, __VA_ARGS__); break;          \
    default: multiply(ROWS, __VA_ARGS__);             \
    }

static void bytes_tile(long rows, const struct quantized *x, long t, const struct packed *w, long panel,
                       __m512 sum[ROWS][2])
{
    FOR_ROWS(multiply_bytes, rows, x, t, w, panel, sum)
}

static void plain_tile(long rows, const struct quantized *x, long t, const struct packed *w, long panel,
                       __m512 sum[ROWS][2])
{
    FOR_ROWS(multiply_plain, rows, x, t, w, panel, sum)
}

/* The lanes of 16 columns from `first` on that are not beyond `end`. */
INLINE __mmask16 lanes(long first, long end)
{
    const long left = end - first;
    return left >= 16 ? 0xFFFF : left > 0 ? (__mmask16)((1 << left) - 1) : 0;
}

INLINE long panels_of(long columns) { return (columns + PANEL - 1) / PANEL; }

INLINE long least(long a, long b) { return a < b ? a : b; }

/* ---- Layers ---- */

/* y [rows, num_values + num_plain] = x W^T + bias, or y += that. bias may be NULL. */
void batchinfer_int8_linear(const struct quantized *x, long rows, const struct packed *w, const float *bias, float *y,
                            int add, int threads)
{
    const long bytes_panels = panels_of(w->num_values), panels = bytes_panels + panels_of(w->num_plain);
    const long blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK, columns = w->num_values + w->num_plain;
#pragma omp parallel for collapse(2) schedule(dynamic, 1) num_threads(threads)
    for (long block = 0; block < blocks; block++)
        for (long panel = 0; panel < panels; panel++) {
            const int is_plain = panel >= bytes_panels;
            const long first = is_plain ? w->num_values + (panel - bytes_panels) * PANEL : panel * PANEL;
            const long end = is_plain ? columns : w->num_values;
            const __mmask16 some[2] = {lanes(first, end), lanes(first + 16, end)};
            __m512 shift[2];
            for (int half = 0; half < 2; half++)
                shift[half] = bias ? _mm512_maskz_loadu_ps(some[half], bias + first + 16 * half) : _mm512_setzero_ps();
            const long stop = least(rows, (block + 1) * ROW_BLOCK);
            for (long t = block * ROW_BLOCK; t < stop; t += ROWS) {
                const long here = least(ROWS, stop - t);
                __m512 sum[ROWS][2];
                if (is_plain)
                    plain_tile(here, x, t, w, panel - bytes_panels, sum);
                else
                    bytes_tile(here, x, t, w, panel, sum);
                for (long r = 0; r < here; r++)
                    for (int half = 0; half < 2; half++) {
                        float *to = y + (t + r) * columns + first + 16 * half;
                        __m512 value = bias ? _mm512_add_ps(sum[r][half], shift[half]) : sum[r][half];
                        if (add)
                            value = _mm512_add_ps(_mm512_maskz_loadu_ps(some[half], to), value);
                        _mm512_mask_storeu_ps(to, some[half], value);
                    }
            }
        }
}

/* silu(x) = x / (1 + e^-x) */
INLINE __m512 silu(__m512 x)
{
    const __m512 power = exp2_of(_mm512_mul_ps(x, _mm512_set1_ps(-1.442695040888963f)));
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), power));
}

/* y = quantized silu(x G^T) * (x U^T). A panel of w holds 16 features of G and the same 16 of U; bias [panels][PANEL]
 * likewise, or NULL. y is padded to whole groups, and so is the number of panels. */
void batchinfer_int8_gated(const struct quantized *x, long rows, const struct packed *w, const float *bias,
                           const struct quantized *y, int threads)
{
    const long groups = w->num_values / PANEL / PANELS_PER_GROUP, blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
#pragma omp parallel for collapse(2) schedule(dynamic, 1) num_threads(threads)
    for (long block = 0; block < blocks; block++)
        for (long g = 0; g < groups; g++) {
            float inner[ROW_BLOCK][GROUP];
            const long start = block * ROW_BLOCK, stop = least(rows, start + ROW_BLOCK);
            for (int p = 0; p < PANELS_PER_GROUP; p++) {
                const long panel = g * PANELS_PER_GROUP + p;
                for (long t = start; t < stop; t += ROWS) {
                    const long here = least(ROWS, stop - t);
                    __m512 sum[ROWS][2];
                    bytes_tile(here, x, t, w, panel, sum);
                    for (long r = 0; r < here; r++) {
                        __m512 gate = sum[r][0], up = sum[r][1];
                        if (bias) {
                            gate = _mm512_add_ps(gate, _mm512_loadu_ps(bias + panel * PANEL));
                            up = _mm512_add_ps(up, _mm512_loadu_ps(bias + panel * PANEL + 16));
                        }
                        _mm512_storeu_ps(inner[t - start + r] + 16 * p, _mm512_mul_ps(silu(gate), up));
                    }
                }
            }
            for (long t = start; t < stop; t++) {
                __m512 values[GROUP_REGISTERS];
                load_group(inner[t - start], GROUP, values);
                store_group(values, y, t, g, groups * GROUP);
            }
        }
}

/* ---- The largest output ---- */

struct largest {
    float value[PANEL];
    int32_t index[PANEL];
    int32_t sick;
};

/* index [rows]: where x W^T is largest, the lowest among equals; finite [rows]: whether all of it is finite. Each
 * thread keeps the largest of each lane for all rows in `scratch` [threads][rows]. */
void batchinfer_int8_argmax(const struct quantized *x, long rows, const struct packed *w, int64_t *index,
                            uint8_t *finite, struct largest *scratch, int threads)
{
    const long bytes_panels = panels_of(w->num_values), panels = bytes_panels + panels_of(w->num_plain);
    const long blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK, columns = w->num_values + w->num_plain;
    for (long i = 0; i < threads * rows; i++) {
        for (int lane = 0; lane < PANEL; lane++) {
            scratch[i].value[lane] = -INFINITY;
            scratch[i].index[lane] = INT32_MAX;
        }
        scratch[i].sick = 0;
    }
#pragma omp parallel for collapse(2) schedule(dynamic, 4) num_threads(threads)
    for (long block = 0; block < blocks; block++)
        for (long panel = 0; panel < panels; panel++) {
            struct largest *mine = scratch + omp_get_thread_num() * rows;
            const int is_plain = panel >= bytes_panels;
            const long first = is_plain ? w->num_values + (panel - bytes_panels) * PANEL : panel * PANEL;
            const long end = is_plain ? columns : w->num_values;
            const long stop = least(rows, (block + 1) * ROW_BLOCK);
            for (long t = block * ROW_BLOCK; t < stop; t += ROWS) {
                const long here = least(ROWS, stop - t);
                __m512 sum[ROWS][2];
                if (is_plain)
                    plain_tile(here, x, t, w, panel - bytes_panels, sum);
                else
                    bytes_tile(here, x, t, w, panel, sum);
                for (long r = 0; r < here; r++) {
                    struct largest *row = mine + t + r;
                    for (int half = 0; half < 2; half++) {
                        const __mmask16 some = lanes(first + 16 * half, end);
                        const __m512 best = _mm512_loadu_ps(row->value + 16 * half);
                        const __m512i at = _mm512_loadu_si512(row->index + 16 * half);
                        const __m512i here_at = _mm512_add_epi32(
                            _mm512_set1_epi32((int)(first + 16 * half)),
                            _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
                        /* Panels come in any order: among equals the lower index. */
                        const __mmask16 more = _mm512_mask_cmp_ps_mask(some, sum[r][half], best, _CMP_GT_OQ);
                        const __mmask16 equal = _mm512_mask_cmp_ps_mask(some, sum[r][half], best, _CMP_EQ_OQ);
                        const __mmask16 taken = more | _mm512_mask_cmplt_epi32_mask(equal, here_at, at);
                        _mm512_mask_storeu_ps(row->value + 16 * half, taken, sum[r][half]);
                        _mm512_mask_storeu_epi32(row->index + 16 * half, taken, here_at);
                        /* NaN, and infinity of either sign. */
                        row->sick |= _mm512_mask_fpclass_ps_mask(some, sum[r][half], 0x01 | 0x08 | 0x10 | 0x80);
                    }
                }
            }
        }
    for (long t = 0; t < rows; t++) {
        float best = -INFINITY;
        int32_t at = INT32_MAX, sick = 0;
        for (int thread = 0; thread < threads; thread++) {
            const struct largest *row = scratch + thread * rows + t;
            sick |= row->sick;
            for (int lane = 0; lane < PANEL; lane++)
                if (row->value[lane] > best || (row->value[lane] == best && row->index[lane] < at)) {
                    best = row->value[lane];
                    at = row->index[lane];
                }
        }
        index[t] = sick ? 0 : at;
        finite[t] = !sick;
    }
}
