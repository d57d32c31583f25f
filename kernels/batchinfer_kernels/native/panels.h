/* Packed weights, and the product of one panel of them with a few rows of activations.
 *
 * Weights lie in panels of PANEL output features, so that a register holds what one instruction multiplies:
 *   bytes      [panels], each one stretch of memory that is read from its start to its end: scales [PANEL], then by group
 *              minus ZERO times the sums of the group's bytes [PANEL], where its sums begin, and the bytes
 *              [length / 4][2][16][4]; the last group may be shorter
 *   bfloat16   [panels][width / 2][2][16][2]
 * Sums of bytes are exact. All else is one chain of operations for each output number, in the order of k, whatever
 * the number of rows: rows are worked on ROWS at a time only because that many sums fit in registers, or MOST_ROWS where
 * there are tiles. TURNED bytes of a half of a panel are a tile as they lie.
 */

#ifndef BATCHINFER_PANELS_H
#define BATCHINFER_PANELS_H

#include <stddef.h>
#include <string.h>

#include "layers.h"
#include "tiles.h"

/* VECTOR: bytes of one number for each feature of a panel. */
enum { ROWS = 6, MOST_ROWS = 2 * TILE_ROWS, PANEL = 32, ROW_BLOCK = 192, LEAST_TILED = 3, VECTOR = 4 * PANEL };

INLINE long least(long a, long b) { return a < b ? a : b; }

INLINE long panel_bytes(long width) { return VECTOR + groups_of(width) * VECTOR + width * PANEL; }

INLINE int32_t four_bytes(const void *at)
{
    int32_t word;
    memcpy(&word, at, 4);
    return word;
}

/* ---- One panel's columns for up to ROWS rows ---- */

/* How many rows are worked on at a time where all features are bytes. */
INLINE long rows_at_a_time(void) { return batchinfer_tiles ? MOST_ROWS : ROWS; }

/* What is fetched on the way, into the second level, since all of the first is in use: the next panel, some lines with
 * each block of each tile, so that memory is never asked for much at once. */
struct ahead {
    const char *at;
    long lines; /* of 64 bytes, with each block */
};

INLINE struct ahead next_panel(const struct packed *w, long panel, long rows)
{
    /* Behind the last panel there is nothing to harm. */
    const long at_a_time = rows_at_a_time(), times = (rows + at_a_time - 1) / at_a_time;
    const long bytes = panel_bytes(w->width), steps = times * (w->width / TURNED);
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

#ifdef __AMX_INT8__
/* Tiles 0 to 3 are sums, of 16 rows and 16 features each, 4 and 5 activations, 6 and 7 weights. */
INLINE void begin_products(void)
{
    static const struct tile_shapes shapes = {
        .palette = 1,
        .bytes = {TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES, TILE_BYTES},
        .rows = {TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS},
    };
    if (batchinfer_tiles)
        _tile_loadconfig(&shapes);
}

INLINE void end_products(void)
{
    if (batchinfer_tiles)
        _tile_release();
}

/* A group's sums of `rows` rows, a constant, go on: by rows, the two halves of a panel. */
INLINE void scale_sums(const long rows, const int32_t whole[MOST_ROWS][PANEL], const char *begins, const float *scales,
                       long groups, __m512 sum[MOST_ROWS][2])
{
    const __m512i begin0 = _mm512_loadu_si512(begins), begin1 = _mm512_loadu_si512(begins + 64);
#pragma GCC unroll 2
    for (long r = 0; r < rows; r++) {
        const __m512 scale = _mm512_set1_ps(scales[r * groups]);
        const __m512i whole0 = _mm512_add_epi32(_mm512_load_si512(whole[r]), begin0);
        const __m512i whole1 = _mm512_add_epi32(_mm512_load_si512(whole[r] + 16), begin1);
        sum[r][0] = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(whole0), sum[r][0]);
        sum[r][1] = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(whole1), sum[r][1]);
    }
}

/* A group's products, to `whole`: of 16 rows from `low` on, and 16 more from `high` on where they are `both`. */
INLINE void multiply_group(const int both, const uint8_t *low, long low_stride, const uint8_t *high, long high_stride,
                           const char *weights, long length, int32_t whole[MOST_ROWS][PANEL])
{
    _tile_zero(0);
    _tile_zero(1);
    if (both) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (long k = 0; k < length; k += TURNED, weights += TURNED * PANEL) {
        _tile_loadd(4, low + k, low_stride);
        _tile_loadd(6, weights, VECTOR);
        _tile_dpbusd(0, 4, 6);
        _tile_loadd(7, weights + 64, VECTOR);
        _tile_dpbusd(1, 4, 7);
        if (both) {
            _tile_loadd(5, high + k, high_stride);
            _tile_dpbusd(2, 5, 6);
            _tile_dpbusd(3, 5, 7);
        }
    }
    _tile_stored(0, whole[0], VECTOR);
    _tile_stored(1, whole[0] + 16, VECTOR);
    if (both) {
        _tile_stored(2, whole[TILE_ROWS], VECTOR);
        _tile_stored(3, whole[TILE_ROWS] + 16, VECTOR);
    }
}

/* The same as `multiply_bytes` for up to MOST_ROWS rows. */
static inline void multiply_tiles(long rows, struct ahead *ahead, const struct quantized *x, long t,
                                  const struct packed *w, long panel, __m512 result[MOST_ROWS][2])
{
    const long width = w->width, groups = groups_of(width);
    const int both = rows > TILE_ROWS;
    const uint8_t *values = x->values + t * width;
    const float *scales = x->scales + t * groups;
    const char *const features = w->bytes + panel * panel_bytes(width), *weights = features + VECTOR;
    /* Of two groups: one's products are made while the other's are scaled. */
    int32_t whole[2][MOST_ROWS][PANEL] __attribute__((aligned(64)));
    /* Rows that are not there are read of here, so that nothing is read behind the activations. */
    uint8_t some[TILE_ROWS][GROUP] __attribute__((aligned(64)));
    const long missing = rows % TILE_ROWS;
    for (long r = 0; r < rows; r++)
        result[r][0] = result[r][1] = _mm512_setzero_ps();
    for (long g = 0; g <= groups; g++) {
        if (g < groups) {
            const long length = least(GROUP, width - g * GROUP);
            const uint8_t *low = values + g * GROUP, *high = low + TILE_ROWS * width;
            long low_stride = width, high_stride = width;
            if (missing) {
                const uint8_t *from = both ? high : low;
                for (long r = 0; r < missing; r++)
                    for (long k = 0; k < length; k += 64)
                        _mm512_store_si512(some[r] + k, _mm512_loadu_si512(from + r * width + k));
                WRITTEN();
                if (both)
                    high = some[0], high_stride = GROUP;
                else
                    low = some[0], low_stride = GROUP;
            }
            for (long i = 0; i < ahead->lines * 2; i++, ahead->at += 64)
                _mm_prefetch(ahead->at, _MM_HINT_T1);
            if (both)
                multiply_group(1, low, low_stride, high, high_stride, weights + VECTOR, length, whole[g & 1]);
            else
                multiply_group(0, low, low_stride, high, high_stride, weights + VECTOR, length, whole[g & 1]);
        }
        if (g > 0) {
            const char *begins = weights - (VECTOR + GROUP * PANEL);
            if (rows == MOST_ROWS)
                scale_sums(MOST_ROWS, whole[~g & 1], begins, scales + g - 1, groups, result);
            else
                scale_sums(rows, whole[~g & 1], begins, scales + g - 1, groups, result);
        }
        weights += VECTOR + GROUP * PANEL;
    }
    const __m512 scale0 = _mm512_loadu_ps(features), scale1 = _mm512_loadu_ps(features + 64);
    for (long r = 0; r < rows; r++) {
        result[r][0] = _mm512_mul_ps(result[r][0], scale0);
        result[r][1] = _mm512_mul_ps(result[r][1], scale1);
    }
}
#else
INLINE void begin_products(void) {}
INLINE void end_products(void) {}
#endif

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

/* Up to `rows_at_a_time` rows. */
static inline void bytes_tile(long rows, struct ahead *ahead, const struct quantized *x, long t,
                              const struct packed *w, long panel, __m512 sum[MOST_ROWS][2])
{
#ifdef __AMX_INT8__
    if (batchinfer_tiles && rows >= LEAST_TILED) {
        multiply_tiles(rows, ahead, x, t, w, panel, sum);
        return;
    }
#endif
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

#endif
