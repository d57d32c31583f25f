/* Packed weights, and the product of one panel of them with a few rows of activations.
 *
 * Weights lie in panels of PANEL output features, so that a register holds what one instruction multiplies:
 *   bytes      [panels][width / GROUP] records, one stretch of memory that is read from its start to its end: scales
 *              [PANEL], minus the sums of the group's bytes [PANEL], which the zeros of the activations are multiplied
 *              by, and the bytes [GROUP / 4][2][16][4]
 *   bfloat16   [panels][width / 2][2][16][2]
 * Sums of bytes are exact. All else is one chain of operations for each output number, in the order of k, whatever
 * the number of rows: rows are worked on ROWS at a time only because that many sums fit in registers.
 */

#ifndef BATCHINFER_PANELS_H
#define BATCHINFER_PANELS_H

#include <stddef.h>
#include <string.h>

#include "layers.h"

enum { ROWS = 6, PANEL = 32, ROW_BLOCK = 192 };

/* A record of bytes: its length, where its parts begin. */
enum { OFFSETS_AT = 4 * PANEL, VALUES_AT = 2 * OFFSETS_AT, RECORD = VALUES_AT + GROUP * PANEL };

INLINE int32_t four_bytes(const void *at)
{
    int32_t word;
    memcpy(&word, at, 4);
    return word;
}

/* ---- One panel's columns for up to ROWS rows ---- */

INLINE long tiles_of(long rows) { return (rows + ROWS - 1) / ROWS; }

/* What is fetched on the way, into the second level, since all of the first is in use: the next panel, some lines with
 * each group of each tile, so that memory is never asked for much at once. */
struct ahead {
    const char *at;
    long lines; /* of 64 bytes, with each group */
};

INLINE struct ahead next_panel(const struct packed *w, long panel, long tiles)
{
    /* Behind the last panel there is nothing to harm. */
    return (struct ahead){w->bytes + (panel + 1) * (w->width / GROUP) * RECORD, (RECORD / 64 + tiles - 1) / tiles};
}

INLINE void multiply_bytes(const int rows, struct ahead *ahead, const struct quantized *x, long t,
                           const struct packed *w, long panel, __m512 result[ROWS][2])
{
    __m512 sum[ROWS][2]; /* registers, which the result, in memory, is not */
    const long width = w->width, groups = width / GROUP;
    const uint8_t *values = x->values + t * width;
    const float *scales = x->scales + t * groups;
    const int32_t *zeros = x->zeros + t * groups;
    const char *record = w->bytes + panel * groups * RECORD, *fetched = ahead->at;
    const long lines = ahead->lines;
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
        sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    for (long g = 0; g < groups; g++, record += RECORD, values += GROUP) {
        __m512i whole[ROWS][2];
        const __m512i offset0 = _mm512_loadu_si512(record + OFFSETS_AT);
        const __m512i offset1 = _mm512_loadu_si512(record + OFFSETS_AT + 64);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            /* Both factors fit 16 bits, and a zero has nothing in its upper half. */
            const __m512i zero = _mm512_set1_epi32(zeros[r * groups + g]);
            whole[r][0] = _mm512_madd_epi16(zero, offset0);
            whole[r][1] = _mm512_madd_epi16(zero, offset1);
        }
        for (long i = 0; i < lines; i++, fetched += 64)
            _mm_prefetch(fetched, _MM_HINT_T1);
        /* In a loop of its own, gcc copies each sum before and after each instruction. */
#pragma GCC unroll 16
        for (int k = 0; k < GROUP; k += 4) {
            const __m512i weight0 = _mm512_loadu_si512(record + VALUES_AT + k * PANEL);
            const __m512i weight1 = _mm512_loadu_si512(record + VALUES_AT + k * PANEL + 64);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                const __m512i four = _mm512_set1_epi32(four_bytes(values + r * width + k));
                whole[r][0] = _mm512_dpbusd_epi32(whole[r][0], four, weight0);
                whole[r][1] = _mm512_dpbusd_epi32(whole[r][1], four, weight1);
            }
        }
        const __m512 scale0 = _mm512_loadu_ps(record), scale1 = _mm512_loadu_ps(record + 64);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            const __m512 scale = _mm512_set1_ps(scales[r * groups + g]);
            sum[r][0] = _mm512_fmadd_ps(scale, _mm512_mul_ps(_mm512_cvtepi32_ps(whole[r][0]), scale0), sum[r][0]);
            sum[r][1] = _mm512_fmadd_ps(scale, _mm512_mul_ps(_mm512_cvtepi32_ps(whole[r][1]), scale1), sum[r][1]);
        }
    }
    ahead->at = fetched;
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
