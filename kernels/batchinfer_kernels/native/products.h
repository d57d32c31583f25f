/* Products of a panel with many rows, in tiles where there are any, and what becomes of each row's sums.
 *
 * What is to be done with a row's two halves of a panel is a function, `take`, which the compiler knows wherever these
 * are called. In tiles that is done while the next products are being made, and so by a later call: `finish` does the
 * last of it.
 *
 * Tiles 0 to 3 are sums, of 16 rows and 16 features each; 4 and 5 activations, of two times 16 rows or bytes and fine
 * bytes of 16 rows; 6 and 7 weights.
 */

#ifndef BATCHINFER_PRODUCTS_H
#define BATCHINFER_PRODUCTS_H

#include "panels.h"
#include "tiles.h"

/* Rows of two tiles. Of fewer than LEAST_TILED rows products are made in registers. */
enum { TILED_ROWS = 2 * TILE_ROWS, LEAST_TILED = 8, ROW_BLOCK = 192 };

/* Which of a layer's outputs a panel gives: columns from `first` on, where there are any up to `end`. */
struct columns {
    long first, end;
};

typedef void take_sums(const void *taker, struct columns columns, long t, __m512 first, __m512 second);

/* How many rows are worked on together where all features are bytes. */
INLINE long rows_at_a_time(void) { return batchinfer_tiles ? TILED_ROWS : ROWS; }

#ifdef __AMX_INT8__
/* Sums of rows t + from .. t + to of a group, which are neither begun nor scaled yet. */
struct sums {
    const int32_t (*whole)[PANEL]; /* of fine panels 16 rows, then those of what is finer */
    const float *scales;
    const char *panel, *begins;
    long groups, t, from, to;
    int is_first, is_last, is_fine;
    struct columns columns;
};

/* A thread's. */
struct tiling {
    struct tile_shapes shapes;
    struct sums waiting; /* none: from is to */
    int at;
    int32_t whole[2][TILED_ROWS][PANEL] __attribute__((aligned(64)));
    float sum[TILED_ROWS][PANEL] __attribute__((aligned(64)));
};

/* `second`: rows of tiles 2, 3 and 5; `first`: of 0, 1 and 4, also where there are none of the others. */
INLINE void shape_tiles(struct tiling *tiling, long first, long second)
{
    const uint8_t rows[8] = {first, first, second, second, first, second, TILE_ROWS, TILE_ROWS};
    if (memcmp(tiling->shapes.rows, rows, sizeof rows) == 0)
        return;
    memcpy(tiling->shapes.rows, rows, sizeof rows);
    WRITTEN();
    _tile_loadconfig(&tiling->shapes);
}

INLINE void begin_products(struct tiling *tiling)
{
    tiling->shapes = (struct tile_shapes){.palette = 1};
    for (int i = 0; i < 8; i++)
        tiling->shapes.bytes[i] = TILE_BYTES;
    tiling->waiting = (struct sums){.from = 0, .to = 0};
    tiling->at = 0;
}

/* Sums of 16 features that a tile has from 0 on, from where their panel begins them. */
INLINE __m512i from_begin(const char *begins, const int32_t *whole)
{
    return _mm512_add_epi32(_mm512_loadu_si512(begins), _mm512_load_si512(whole));
}

/* Rows from .. to of those that wait, of which the compiler knows what they are. */
INLINE void scale_sums(const int is_fine, const int is_first, const int is_last, const struct sums *s, long from,
                       long to, float (*sum)[PANEL], take_sums *take, const void *taker)
{
    const __m512 scale0 = _mm512_loadu_ps(s->panel), scale1 = _mm512_loadu_ps(s->panel + 64);
    const int32_t(*const whole)[PANEL] = s->whole;
    const float *scales = s->scales + from * s->groups;
    const struct columns columns = s->columns;
    const long groups = s->groups, t = s->t;
#pragma GCC unroll 4
    for (long r = from; r < to; r++, scales += groups) {
        const __m512 scale = _mm512_set1_ps(*scales);
        __m512 part[2];
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const char *begins = s->begins + 64 * half;
            const __m512i exact = from_begin(begins, whole[r] + 16 * half);
            if (is_fine)
                part[half] = fine_group_sums(exact, from_begin(begins + VECTOR, whole[TILE_ROWS + r] + 16 * half));
            else
                part[half] = group_sums(exact);
            const __m512 before = is_first ? _mm512_setzero_ps() : _mm512_load_ps(sum[r] + 16 * half);
            part[half] = _mm512_fmadd_ps(scale, part[half], before);
            if (!is_last)
                _mm512_store_ps(sum[r] + 16 * half, part[half]);
        }
        if (is_last)
            take(taker, columns, t + r, _mm512_mul_ps(part[0], scale0), _mm512_mul_ps(part[1], scale1));
    }
}

/* The next `count` of the rows that wait. */
INLINE void finish_rows(struct tiling *tiling, long count, take_sums *take, const void *taker)
{
    struct sums *const s = &tiling->waiting;
    const long from = s->from, stop = least(s->to, from + count);
    if (from >= stop)
        return;
#define SCALE(is_first, is_last)                                                             \
    do {                                                                                     \
        if (s->is_fine)                                                                      \
            scale_sums(1, is_first, is_last, s, from, stop, tiling->sum, take, taker);       \
        else                                                                                 \
            scale_sums(0, is_first, is_last, s, from, stop, tiling->sum, take, taker);       \
    } while (0)
    if (s->is_last && s->is_first)
        SCALE(1, 1);
    else if (s->is_last)
        SCALE(0, 1);
    else if (s->is_first)
        SCALE(1, 0);
    else
        SCALE(0, 0);
#undef SCALE
    s->from = stop;
}

/* Rows from t on, as many as tiles are shaped for, of which from .. to are wanted. Sums of a group are scaled while the
 * next group's products are made: some with each step, since the processor can't look ahead over all of them. */
INLINE void multiply_tiles(struct tiling *tiling, struct ahead *ahead, const int is_fine, const struct quantized *x,
                           const char *panel, long width, long t, long from, long to, struct columns columns,
                           take_sums *take, const void *taker)
{
    const long groups = groups_of(width), group = group_of(width);
    const int is_two = !is_fine && to > TILE_ROWS;
    const char *weights = panel + VECTOR;
    for (long g = 0; g < groups; g++) {
        const long length = least(group, width - g * group), steps = length / TURNED;
        const uint8_t *values = x->values + t * width + g * group;
        const uint8_t *others = is_fine ? x->fine + t * width + g * group : values + TILE_ROWS * width;
        const char *fine_weights = weights + 2 * VECTOR + length * PANEL;
        const long count = (tiling->waiting.to - tiling->waiting.from + steps - 1) / steps;
        int32_t(*whole)[PANEL] = tiling->whole[tiling->at];
        const char *const begins = weights;
        weights += is_fine ? 2 * VECTOR : VECTOR;
        _tile_zero(0);
        _tile_zero(1);
        if (is_fine || is_two) {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (long k = 0; k < length; k += TURNED, weights += TURNED * PANEL) {
            _tile_loadd(4, values + k, width);
            _tile_loadd(6, weights, VECTOR);
            _tile_dpbusd(0, 4, 6);
            _tile_loadd(7, weights + 64, VECTOR);
            _tile_dpbusd(1, 4, 7);
            if (is_fine || is_two) {
                _tile_loadd(5, others + k, width);
                _tile_dpbusd(2, 5, 6);
                _tile_dpbusd(3, 5, 7);
            }
            if (is_fine) {
                _tile_loadd(6, fine_weights + k * PANEL, VECTOR);
                _tile_dpbusd(2, 4, 6);
                _tile_loadd(7, fine_weights + k * PANEL + 64, VECTOR);
                _tile_dpbusd(3, 4, 7);
            }
            fetch_ahead(ahead);
            finish_rows(tiling, count, take, taker);
        }
        if (is_fine)
            weights += length * PANEL;
        WRITTEN();
        _tile_stored(0, whole[0], VECTOR);
        _tile_stored(1, whole[0] + 16, VECTOR);
        if (is_fine || is_two) {
            _tile_stored(2, whole[TILE_ROWS], VECTOR);
            _tile_stored(3, whole[TILE_ROWS] + 16, VECTOR);
        }
        tiling->waiting = (struct sums){.whole = (const int32_t(*)[PANEL])whole,
                                        .scales = x->scales + t * groups + g,
                                        .panel = panel,
                                        .begins = begins,
                                        .groups = groups,
                                        .t = t,
                                        .from = from,
                                        .to = to,
                                        .is_first = g == 0,
                                        .is_last = g == groups - 1,
                                        .is_fine = is_fine,
                                        .columns = columns};
        tiling->at ^= 1;
    }
}

/* Rows start .. stop of all `rows`. Tiles are whole where there are rows for that: the last may take some again, whose
 * sums nobody wants. */
INLINE void tile_rows(struct tiling *tiling, struct ahead *ahead, const int is_fine, const struct quantized *x,
                      long rows, const char *panel, long width, long start, long stop, struct columns columns,
                      take_sums *take, const void *taker)
{
    const long first = least(rows, TILE_ROWS), second = least(rows - first, TILE_ROWS);
    if (is_fine)
        shape_tiles(tiling, first, first);
    else
        shape_tiles(tiling, first, second > 0 ? second : first);
    const long step = is_fine ? first : first + second;
    for (long t = start; t < stop; t += step) {
        const long wanted = least(step, stop - t), most = wanted > first ? step : first;
        const long from = t + most > rows ? t + most - rows : 0;
        multiply_tiles(tiling, ahead, is_fine, x, panel, width, t - from, from, from + wanted, columns, take, taker);
    }
}

INLINE void end_products(struct tiling *tiling)
{
    if (tiling->shapes.rows[0])
        _tile_release();
}
#else
struct tiling {
    int is_empty;
};
INLINE void begin_products(struct tiling *tiling) { tiling->is_empty = 1; }
INLINE void end_products(struct tiling *tiling) { (void)tiling; }
#endif

/* What is left to be done; the caller's barrier comes behind it. */
INLINE void finish(struct tiling *tiling, take_sums *take, const void *taker)
{
#ifdef __AMX_INT8__
    finish_rows(tiling, TILED_ROWS, take, taker);
#endif
    end_products(tiling);
}

/* What is fetched beside a panel's product with so many rows; behind the last panel there is nothing to harm. */
INLINE struct ahead next_panel(const char *panel, long bytes, long width, long rows, long at_a_time)
{
    const long steps = (rows + at_a_time - 1) / at_a_time * (width / TURNED);
    return (struct ahead){panel + bytes, (bytes / 64 + steps - 1) / steps};
}

/* Rows start .. stop of all `rows` with panel `at` of a layer's bytes. */
INLINE void multiply_panel(struct tiling *tiling, const struct quantized *x, long rows, const struct packed *w, long at,
                           long start, long stop, struct columns columns, take_sums *take, const void *taker)
{
    const long width = w->width, bytes = panel_bytes(width);
    const char *const panel = w->bytes + at * bytes;
#ifdef __AMX_INT8__
    if (batchinfer_tiles && rows >= LEAST_TILED) {
        struct ahead ahead = next_panel(panel, bytes, width, stop - start, least(rows, TILED_ROWS));
        tile_rows(tiling, &ahead, 0, x, rows, panel, width, start, stop, columns, take, taker);
        return;
    }
#endif
    struct ahead ahead = next_panel(panel, bytes, width, stop - start, ROWS);
    for (long t = start; t < stop; t += ROWS) {
        const long here = least(ROWS, stop - t);
        __m512 sum[ROWS][2];
        bytes_rows(here, &ahead, x, t, panel, width, sum);
        for (long r = 0; r < here; r++)
            take(taker, columns, t + r, sum[r][0], sum[r][1]);
    }
}

/* The same with panel `at` of a layer's fine bytes. */
INLINE void multiply_fine_panel(struct tiling *tiling, const struct quantized *x, long rows, const struct packed *w,
                                long at, long start, long stop, struct columns columns, take_sums *take,
                                const void *taker)
{
    const long width = w->width, bytes = fine_panel_bytes(width);
    const char *const panel = w->fine + at * bytes;
#ifdef __AMX_INT8__
    if (batchinfer_tiles && rows >= LEAST_TILED) {
        struct ahead ahead = next_panel(panel, bytes, width, stop - start, least(rows, TILE_ROWS));
        tile_rows(tiling, &ahead, 1, x, rows, panel, width, start, stop, columns, take, taker);
        return;
    }
#endif
    struct ahead ahead = next_panel(panel, bytes, width, stop - start, FINE_ROWS);
    for (long t = start; t < stop; t += FINE_ROWS) {
        const long here = least(FINE_ROWS, stop - t);
        __m512 sum[ROWS][2];
        fine_rows(here, &ahead, x, t, panel, width, sum);
        for (long r = 0; r < here; r++)
            take(taker, columns, t + r, sum[r][0], sum[r][1]);
    }
}

/* And of its bfloat16. */
INLINE void multiply_plain_panel(const struct quantized *x, const struct packed *w, long at, long start, long stop,
                                 struct columns columns, take_sums *take, const void *taker)
{
    for (long t = start; t < stop; t += ROWS) {
        const long here = least(ROWS, stop - t);
        __m512 sum[ROWS][2];
        plain_rows(here, x, t, w->plain + at * w->width * PANEL, w->width, sum);
        for (long r = 0; r < here; r++)
            take(taker, columns, t + r, sum[r][0], sum[r][1]);
    }
}

#endif
