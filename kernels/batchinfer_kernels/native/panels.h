/* Packed weights, and the product of one panel of them with a few rows of activations in 512-bit registers.
 *
 * Weights lie in panels of PANEL output features, so that a register holds what one instruction multiplies:
 *   bytes      [panels], each one stretch of memory that is read from its start to its end: scales [PANEL], then by
 *              group minus ZERO times the sums of the group's bytes [PANEL], where its sums begin, and the bytes
 *              [length / 4][2][16][4]; the last group may be shorter
 *   fine       the same, but by group two such vectors, the second minus ZERO times the sums of the group's bytes and
 *              of its fine ones, then the bytes, then the fine bytes
 *   bfloat16   [panels][width / 2][2][16][2]
 * Sums of bytes are exact. All else is one chain of operations for each output number, in the order of k, whatever the
 * number of rows: rows are worked on ROWS at a time only because that many sums fit in registers, or other numbers in
 * tiles. TURNED bytes of a half of a panel are a tile as they lie.
 */

#ifndef BATCHINFER_PANELS_H
#define BATCHINFER_PANELS_H

#include <stddef.h>
#include <string.h>

#include "layers.h"

/* VECTOR: bytes of one number for each feature of a panel. FINE_ROWS: these have twice as many sums. */
enum { ROWS = 6, FINE_ROWS = 3, PANEL = 32, VECTOR = 4 * PANEL };

/* Sums of a group, twice as large ones of what is finer, are exact in float32. */
_Static_assert(2L * MOST_GROUP * ZERO * MOST < 1 << 24, "a group has too many inputs");

INLINE long panels_of(long columns) { return (columns + PANEL - 1) / PANEL; }

INLINE long panel_bytes(long width) { return VECTOR + groups_of(width) * VECTOR + width * PANEL; }

INLINE long fine_panel_bytes(long width) { return VECTOR + groups_of(width) * 2 * VECTOR + 2 * width * PANEL; }

INLINE int32_t four_bytes(const void *at)
{
    int32_t word;
    memcpy(&word, at, 4);
    return word;
}

/* What is fetched on the way, into the second level, since all of the first is in use: the next panel, some lines with
 * each block of each rows that are worked on together, so that memory is never asked for much at once. */
struct ahead {
    const char *at;
    long lines; /* of 64 bytes, with each block */
};

INLINE void fetch_ahead(struct ahead *ahead)
{
    for (long i = 0; i < ahead->lines; i++, ahead->at += 64)
        _mm_prefetch(ahead->at, _MM_HINT_T1);
}

/* What a group's exact sums come to: those of bytes, and of what is finer. */
INLINE __m512 group_sums(__m512i whole) { return _mm512_cvtepi32_ps(whole); }
INLINE __m512 fine_group_sums(__m512i whole, __m512i finer)
{
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(finer), _mm512_set1_ps(1.0f / FINER), _mm512_cvtepi32_ps(whole));
}

/* Up to ROWS rows from t on, of a panel of bytes. */
INLINE void multiply_bytes(const int rows, struct ahead *ahead, const struct quantized *x, long t, const char *panel,
                           long width, __m512 result[ROWS][2])
{
    __m512 sum[ROWS][2]; /* registers, which the result, in memory, is not */
    const long groups = groups_of(width), group = group_of(width);
    const uint8_t *values = x->values + t * width, *const end = values + width;
    const float *scales = x->scales + t * groups;
    const char *weights = panel + VECTOR;
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
        sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    for (long g = 0; g < groups; g++) {
        const uint8_t *const stop = end - values > group ? values + group : end;
        __m512i whole[ROWS][2];
        const __m512i begin0 = _mm512_loadu_si512(weights), begin1 = _mm512_loadu_si512(weights + 64);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            whole[r][0] = begin0;
            whole[r][1] = begin1;
        }
        weights += VECTOR;
        do {
            fetch_ahead(ahead);
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
            sum[r][0] = _mm512_fmadd_ps(scale, group_sums(whole[r][0]), sum[r][0]);
            sum[r][1] = _mm512_fmadd_ps(scale, group_sums(whole[r][1]), sum[r][1]);
        }
    }
    const __m512 scale0 = _mm512_loadu_ps(panel), scale1 = _mm512_loadu_ps(panel + 64);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        result[r][0] = _mm512_mul_ps(sum[r][0], scale0);
        result[r][1] = _mm512_mul_ps(sum[r][1], scale1);
    }
}

/* Up to FINE_ROWS rows from t on, of a fine panel: bytes with bytes, and what is finer of each with the other's. */
INLINE void multiply_fine(const int rows, struct ahead *ahead, const struct quantized *x, long t, const char *panel,
                          long width, __m512 result[ROWS][2])
{
    __m512 sum[FINE_ROWS][2];
    const long groups = groups_of(width), group = group_of(width);
    const char *weights = panel + VECTOR;
#pragma GCC unroll 3
    for (int r = 0; r < rows; r++)
        sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    for (long g = 0; g < groups; g++) {
        const long length = least(group, width - g * group);
        const uint8_t *values = x->values + t * width + g * group, *fine = x->fine + t * width + g * group;
        const char *fine_weights = weights + 2 * VECTOR + length * PANEL;
        __m512i whole[FINE_ROWS][2], finer[FINE_ROWS][2];
#pragma GCC unroll 3
        for (int r = 0; r < rows; r++)
            for (int half = 0; half < 2; half++) {
                whole[r][half] = _mm512_loadu_si512(weights + 64 * half);
                finer[r][half] = _mm512_loadu_si512(weights + VECTOR + 64 * half);
            }
        weights += 2 * VECTOR;
        for (long k = 0; k < length; k += 4) {
            if (k % TURNED == 0)
                fetch_ahead(ahead);
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                const __m512i weight = _mm512_loadu_si512(weights + k * PANEL + 64 * half);
                const __m512i fine_weight = _mm512_loadu_si512(fine_weights + k * PANEL + 64 * half);
#pragma GCC unroll 3
                for (int r = 0; r < rows; r++) {
                    const __m512i four = _mm512_set1_epi32(four_bytes(values + r * width + k));
                    const __m512i fine_four = _mm512_set1_epi32(four_bytes(fine + r * width + k));
                    whole[r][half] = dot_fours(whole[r][half], four, weight);
                    finer[r][half] = dot_fours(finer[r][half], four, fine_weight);
                    finer[r][half] = dot_fours(finer[r][half], fine_four, weight);
                }
            }
        }
        weights = fine_weights + length * PANEL;
#pragma GCC unroll 3
        for (int r = 0; r < rows; r++) {
            const __m512 scale = _mm512_set1_ps(x->scales[(t + r) * groups + g]);
            for (int half = 0; half < 2; half++)
                sum[r][half] = _mm512_fmadd_ps(scale, fine_group_sums(whole[r][half], finer[r][half]), sum[r][half]);
        }
    }
#pragma GCC unroll 3
    for (int r = 0; r < rows; r++)
        for (int half = 0; half < 2; half++)
            result[r][half] = _mm512_mul_ps(sum[r][half], _mm512_loadu_ps(panel + 64 * half));
}

/* Up to ROWS rows from t on, of a panel in bfloat16. */
INLINE void multiply_plain(const int rows, const struct quantized *x, long t, const uint16_t *weights, long width,
                           __m512 result[ROWS][2])
{
    __m512 sum[ROWS][2]; /* registers, which the result, in memory, is not */
    const uint16_t *values = x->plain + t * width;
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
        sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    for (long k = 0; k < width; k += 2) {
        const __m512i weight0 = _mm512_loadu_si512(weights), weight1 = _mm512_loadu_si512(weights + 32);
        weights += 2 * PANEL;
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            const __m512i two = _mm512_set1_epi32(four_bytes(values + r * width + k));
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

static inline void bytes_rows(long rows, struct ahead *ahead, const struct quantized *x, long t, const char *panel,
                              long width, __m512 sum[ROWS][2])
{
    FOR_ROWS(multiply_bytes, rows, ahead, x, t, panel, width, sum)
}

static inline void fine_rows(long rows, struct ahead *ahead, const struct quantized *x, long t, const char *panel,
                             long width, __m512 sum[ROWS][2])
{
    switch (rows) {
    case 1: multiply_fine(1, ahead, x, t, panel, width, sum); break;
    case 2: multiply_fine(2, ahead, x, t, panel, width, sum); break;
    default: multiply_fine(FINE_ROWS, ahead, x, t, panel, width, sum);
    }
}

static inline void plain_rows(long rows, const struct quantized *x, long t, const uint16_t *panel, long width,
                              __m512 sum[ROWS][2])
{
    FOR_ROWS(multiply_plain, rows, x, t, panel, width, sum)
}

#endif
