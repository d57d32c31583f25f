/* Packed weights, and the product of one panel of them with a few rows of activations.
 *
 * Weights lie in panels of PANEL output features, so that a register holds what one instruction multiplies:
 *   bytes      [panels], each one stretch of memory that is read from its start to its end: scales [PANEL], then by group
 *              minus ZERO times the sums of the group's bytes [PANEL], where its sums begin, and the bytes
 *              [length / 4][2][16][4]; the last group may be shorter
 *   bfloat16   [panels][width / 2][2][16][2]
 * Sums of bytes are exact. All else is one chain of operations for each output number, in the order of k, whatever
 * the number of rows: rows are worked on ROWS at a time only because that many sums fit in registers.
 */

#ifndef BATCHINFER_PANELS_H
#define BATCHINFER_PANELS_H

#include <stddef.h>
#include <string.h>

#include "layers.h"

/* VECTOR: bytes of one number for each feature of a panel. */
enum { ROWS = 6, PANEL = 32, ROW_BLOCK = 192, VECTOR = 4 * PANEL };

INLINE long panel_bytes(long width) { return VECTOR + groups_of(width) * VECTOR + width * PANEL; }

INLINE int32_t four_bytes(const void *at)
{
    int32_t word;
    memcpy(&word, at, 4);
    return word;
}

/* ---- One panel's columns for up to ROWS rows ---- */

INLINE long tiles_of(long rows) { return (rows + ROWS - 1) / ROWS; }

/* What is fetched on the way, into the second level, since all of the first is in use: the next panel, some lines with
 * each block of each tile, so that memory is never asked for much at once. */
struct ahead {
    const char *at;
    long lines; /* of 64 bytes, with each block */
};

INLINE struct ahead next_panel(const struct packed *w, long panel, long tiles)
{
    /* Behind the last panel there is nothing to harm. */
    const long bytes = panel_bytes(w->width), steps = tiles * (w->width / TURNED);
    return (struct ahead){w->bytes + (panel + 1) * bytes, (bytes / 64 + steps - 1) / steps};
}

INLINE void multiply_bytes(const int rows, struct ahead *ahead, const struct quantized *x, long t,
                           const struct packed *w, long panel, __m512 result[ROWS][2])
{
    __m512 sum[ROWS][2]; /* registers, which the result, in memory, is not */
    const long width = w->width, groups = groups_of(width);
    const uint8_t *values = x->values + t * width, *const end = values + width;
    const float *scales = x->scales + t * groups;
    const char *const features = w->bytes + panel * panel_bytes(width), *weights = features + VECTOR;
    const char *fetched = ahead->at;
    const long lines = ahead->lines;
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
        sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    for (long g = 0; g < groups; g++) {
        const uint8_t *const stop = end - values > GROUP ? values + GROUP : end;
        __m512i whole[ROWS][2];
        const __m512i begin0 = _mm512_loadu_si512(weights), begin1 = _mm512_loadu_si512(weights + 64);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            whole[r][0] = begin0;
            whole[r][1] = begin1;
        }
        weights += VECTOR;
        do {
            for (long i = 0; i < lines; i++, fetched += 64)
                _mm_prefetch(fetched, _MM_HINT_T1);
#pragma GCC unroll 16
            for (int k = 0; k < TURNED; k += 4) {
                const __m512i weight0 = _mm512_loadu_si512(weights + k * PANEL);
                const __m512i weight1 = _mm512_loadu_si512(weights + k * PANEL + 64);
#pragma GCC unroll 6
                for (int r = 0; r < rows; r++) {
                    const __m512i four = _mm512_set1_epi32(four_bytes(values + r * width + k));
                    whole[r][0] = dot_fours(whole[r][0], four, weight0);
                    whole[r][1] = dot_fours(whole[r][1], four, weight1);
                }
            }
            values += TURNED;
            weights += TURNED * PANEL;
        } while (values < stop);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            const __m512 scale = _mm512_set1_ps(scales[r * groups + g]);
            sum[r][0] = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(whole[r][0]), sum[r][0]);
            sum[r][1] = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(whole[r][1]), sum[r][1]);
        }
    }
    ahead->at = fetched;
    const __m512 scale0 = _mm512_loadu_ps(features), scale1 = _mm512_loadu_ps(features + 64);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        result[r][0] = _mm512_mul_ps(sum[r][0], scale0);
        result[r][1] = _mm512_mul_ps(sum[r][1], scale1);
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

static inline void bytes_tile(long rows, struct ahead *ahead, const struct quantized *x, long t,
                              const struct packed *w, long panel, __m512 sum[ROWS][2])
{
    FOR_ROWS(multiply_bytes, rows, ahead, x, t, w, panel, sum)
}

static inline void plain_tile(long rows, const struct quantized *x, long t, const struct packed *w, long panel,
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

#endif
