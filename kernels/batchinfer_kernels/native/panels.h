/* Packed weights, and the product of one panel of them with a few rows of activations.
 *
 * Weights lie in panels of PANEL output features, so that a register holds what one instruction multiplies:
 *   bytes      [panels], each one stretch of memory that is read from its start to its end: scales [PANEL], then by group
 *              minus ZERO times the sums of the group's bytes [PANEL], where its sums begin, and the bytes
 *              [length / 4][2][16][4]; the last group may be shorter
 *   bfloat16   [panels][width / 2][2][16][2]
 * Sums of bytes are exact. All else is one chain of operations for each output number, in the order of k, whatever
 * the number of rows: rows are worked on ROWS at a time only because that many sums fit in registers, or MOST_ROWS, a
 * tile's, where there are tiles. TURNED bytes of a half of a panel are a tile as they lie.
 */

#ifndef BATCHINFER_PANELS_H
#define BATCHINFER_PANELS_H

#include <stddef.h>
#include <string.h>

#include "layers.h"
#include "tiles.h"

/* VECTOR: bytes of one number for each feature of a panel. */
enum { ROWS = 6, MOST_ROWS = TILE_ROWS, PANEL = 32, ROW_BLOCK = 192, LEAST_TILED = 6, VECTOR = 4 * PANEL };

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
/* Where a group stands in its row: what it is added to, and whether the row's sums are then complete. */
struct place {
    int is_first, is_last;
};

/* A group's sums of `rows` rows go on; by rows, the two halves of a panel. `begins`: of the group, `features`: of the
 * panel. */
INLINE void scale_sums(const long rows, const struct place place, const int32_t whole[MOST_ROWS][PANEL],
                       const char *begins, const float *scales, long groups, const char *features,
                       __m512 sum[MOST_ROWS][2])
{
    for (int half = 0; half < 2; half++) {
        const __m512i begin = _mm512_loadu_si512(begins + 64 * half);
        const __m512 last_scale = _mm512_loadu_ps(features + 64 * half);
#pragma GCC unroll 16
        for (long r = 0; r < rows; r++) {
            const __m512 scale = _mm512_set1_ps(scales[r * groups]);
            const __m512i exact = _mm512_add_epi32(_mm512_load_si512(whole[r] + 16 * half), begin);
            const __m512 part = _mm512_cvtepi32_ps(exact);
            __m512 next = place.is_first ? _mm512_mul_ps(scale, part) : _mm512_fmadd_ps(scale, part, sum[r][half]);
            if (place.is_last)
                next = _mm512_mul_ps(next, last_scale);
            sum[r][half] = next;
        }
    }
}

/* Tiles 0 to 3 are sums, of 16 rows and 16 features each, 4 are activations, 5 and 6 weights.
 *
 * The same as `multiply_bytes` for up to MOST_ROWS rows. Of two groups one's products are made while the other's sums are
 * scaled: that is why each has tiles of its own, and why a step is this short, which the processor can look ahead over. */
static inline void multiply_tiles(long rows, struct ahead *ahead, const struct quantized *x, long t,
                                  const struct packed *w, long panel, __m512 result[MOST_ROWS][2])
{
    const long width = w->width, groups = groups_of(width);
    const uint8_t *values = x->values + t * width;
    const float *scales = x->scales + t * groups;
    const char *const features = w->bytes + panel * panel_bytes(width), *weights = features + VECTOR;
    int32_t whole[2][MOST_ROWS][PANEL] __attribute__((aligned(64)));
    /* Of fewer rows: nothing is read behind the activations. */
    uint8_t some[MOST_ROWS][GROUP] __attribute__((aligned(64)));

#define SCALE(g, is_first, is_last)                                                                                  \
    do {                                                                                                             \
        const char *const begins = features + VECTOR + (g) * (VECTOR + GROUP * PANEL);                               \
        if (rows == MOST_ROWS)                                                                                       \
            scale_sums(MOST_ROWS, (struct place){is_first, is_last}, whole[(g) & 1], begins, scales + (g), groups,   \
                       features, result);                                                                            \
        else                                                                                                         \
            scale_sums(rows, (struct place){is_first, is_last}, whole[(g) & 1], begins, scales + (g), groups,        \
                       features, result);                                                                            \
    } while (0)
/* Numbers of tiles are constants. */
#define GROUP_STEP(left, right)                                                                                      \
    do {                                                                                                             \
        _tile_zero(left);                                                                                            \
        _tile_zero(right);                                                                                           \
        for (long k = 0; k < length; k += TURNED) {                                                                  \
            _tile_loadd(4, from + k, stride);                                                                        \
            _tile_loadd(5, weights + k * PANEL, VECTOR);                                                             \
            _tile_dpbusd(left, 4, 5);                                                                                \
            _tile_loadd(6, weights + k * PANEL + 64, VECTOR);                                                        \
            _tile_dpbusd(right, 4, 6);                                                                               \
        }                                                                                                            \
        WRITTEN();                                                                                                   \
        if (g == 1)                                                                                                  \
            SCALE(g - 1, 1, 0);                                                                                      \
        else if (g > 1)                                                                                              \
            SCALE(g - 1, 0, 0);                                                                                      \
        WRITTEN();                                                                                                   \
        _tile_stored(left, whole[g & 1][0], VECTOR);                                                                 \
        _tile_stored(right, whole[g & 1][0] + 16, VECTOR);                                                           \
    } while (0)

    for (long g = 0; g < groups; g++, values += GROUP, weights += GROUP * PANEL) {
        const long length = least(GROUP, width - g * GROUP);
        const uint8_t *from = values;
        long stride = width;
        weights += VECTOR;
        if (rows < MOST_ROWS) {
            for (long r = 0; r < rows; r++)
                for (long k = 0; k < length; k += 64)
                    _mm512_store_si512(some[r] + k, _mm512_loadu_si512(values + r * width + k));
            WRITTEN();
            from = some[0];
            stride = GROUP;
        }
        for (long i = 0; i < ahead->lines * (length / TURNED); i++, ahead->at += 64)
            _mm_prefetch(ahead->at, _MM_HINT_T1);
        if (g & 1)
            GROUP_STEP(2, 3);
        else
            GROUP_STEP(0, 1);
    }
    if (groups == 1)
        SCALE(0, 1, 1);
    else
        SCALE(groups - 1, 0, 1);
#undef GROUP_STEP
#undef SCALE
}
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
