/* Products of a panel with many rows, in tiles where there are any, and what becomes of each row's sums.
 *
 * What is to be done with a row's two halves of a panel is a function, `take`, which the compiler knows wherever these
 * are called. In tiles that is done while the next products are being made, and so by a later call: `end_products`
 * does the last of it.
 *
 * Tiles 0 to 3 are sums, of 16 rows and 16 features each; 4 and 5 activations, of two times 16 rows or bytes and fine
 * bytes of 16 rows; 6 and 7 weights.
 */

#ifndef BATCHINFER_PRODUCTS_H
#define BATCHINFER_PRODUCTS_H

#include "panels.h"
#include "tiles.h"

/* Rows of two tiles. Of fewer than LEAST_TILED rows products are made in registers. */
enum { TILED_ROWS = 2 * TILE_ROWS, LEAST_TILED = 8 };

/* Which of a layer's outputs a panel gives: columns from `first` on, where there are any up to `end`. */
struct columns {
    long first, end;
};

typedef void take_sums(const void *taker, struct columns columns, long t, __m512 first, __m512 second);

/* How many rows at most pass by a panel before the next one: their activations stay in the second-level cache, which is
 * larger where there are tiles. */
INLINE long row_block(void) { return batchinfer_tiles ? 512 : 192; }

/* How many rows are worked on together where all features are bytes. */
INLINE long rows_at_a_time(void) { return batchinfer_tiles ? TILED_ROWS : ROWS; }

/* What is done with sums: `take` with a row's, and `scale`, where these come from tiles, with those of some rows of the
 * last group: by whether they are fine, and whether it is the first group too. */
struct sums;
typedef void scale_rows(const struct sums *sums, long from, long to);
struct taking {
    take_sums *take;
    scale_rows *scale[2][2];
};

#ifdef __AMX_INT8__
/* Sums of rows t + from .. t + to of a group, which are not scaled yet. */
struct sums {
    scale_rows *scale;
    const int32_t (*whole)[PANEL]; /* of fine panels 16 rows, then those of what is finer */
    float (*sum)[PANEL];           /* of the groups before */
    const float *scales;
    const char *panel;
    long groups, t, from, to;
    struct columns columns;
    const void *taker;
};

/* A thread's. */
struct tiling {
    struct tile_shapes shapes;
    struct sums waiting; /* none: from is to */
    int32_t whole[TILED_ROWS][PANEL] __attribute__((aligned(64)));
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
    tiling->waiting.from = tiling->waiting.to = 0;
}

/* Rows from .. to, of which the compiler knows what they are and what becomes of them. */
INLINE void scale_sums(const int is_fine, const int is_first, const int is_last, const struct sums *s, long from,
                       long to, take_sums *take, const void *taker)
{
    __m512 scale0, scale1;
    if (is_last) {
        scale0 = _mm512_loadu_ps(s->panel);
        scale1 = _mm512_loadu_ps(s->panel + 64);
    }
    const int32_t(*const whole)[PANEL] = s->whole;
    float(*const sum)[PANEL] = s->sum;
    const struct columns columns = s->columns;
    const long groups = s->groups, t = s->t;
    const float *scales = s->scales + from * groups;
#pragma GCC unroll 4
    for (long r = from; r < to; r++, scales += groups) {
        const __m512 scale = _mm512_set1_ps(*scales);
        __m512 part[2];
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const __m512i exact = _mm512_load_si512(whole[r] + 16 * half);
            part[half] = is_fine ? fine_group_sums(exact, _mm512_load_si512(whole[TILE_ROWS + r] + 16 * half))
                                 : group_sums(exact);
            part[half] = is_first ? _mm512_mul_ps(scale, part[half])
                                  : _mm512_fmadd_ps(scale, part[half], _mm512_load_ps(sum[r] + 16 * half));
            if (!is_last)
                _mm512_store_ps(sum[r] + 16 * half, part[half]);
        }
        if (is_last)
            take(taker, columns, t + r, _mm512_mul_ps(part[0], scale0), _mm512_mul_ps(part[1], scale1));
    }
}

/* Sums of a group that is not the last. */
static void scale_first(const struct sums *s, long from, long to) { scale_sums(0, 1, 0, s, from, to, NULL, NULL); }
static void scale_next(const struct sums *s, long from, long to) { scale_sums(0, 0, 0, s, from, to, NULL, NULL); }
static void scale_fine_first(const struct sums *s, long from, long to) { scale_sums(1, 1, 0, s, from, to, NULL, NULL); }
static void scale_fine_next(const struct sums *s, long from, long to) { scale_sums(1, 0, 0, s, from, to, NULL, NULL); }

/* Defines the taking `name`: `take`, which is given what is there of a `type`. It is copied, so that the compiler sees
 * that nothing which is written changes it. */
#define SCALE_LAST(name, type, take, is_fine, is_first)                                                               \
    static void name(const struct sums *s, long from, long to)                                                        \
    {                                                                                                                 \
        const type taker = *(const type *)s->taker;                                                                   \
        scale_sums(is_fine, is_first, 1, s, from, to, take, &taker);                                                  \
    }
#define TAKING(name, type, take)                                                                                      \
    SCALE_LAST(name##_last, type, take, 0, 0)                                                                         \
    SCALE_LAST(name##_only, type, take, 0, 1)                                                                         \
    SCALE_LAST(name##_fine_last, type, take, 1, 0)                                                                    \
    SCALE_LAST(name##_fine_only, type, take, 1, 1)                                                                    \
    static const struct taking name = {take, {{name##_last, name##_only}, {name##_fine_last, name##_fine_only}}};

/* The next `count` of the rows that wait. */
INLINE void finish_rows(struct tiling *tiling, long count)
{
    struct sums *const s = &tiling->waiting;
    const long from = s->from, stop = least(s->to, from + count);
    if (from >= stop)
        return;
    s->scale(s, from, stop);
    s->from = stop;
}

/* Rows from t on, as many as tiles are shaped for, of which from .. to are wanted. Sums of a group are scaled while the
 * next group's products are made: some with each step, since the processor can't look ahead over all of them. */
INLINE void multiply_tiles(struct tiling *tiling, struct ahead *ahead, const int is_fine, const struct quantized *x,
                           const char *panel, long width, long t, long from, long to, struct columns columns,
                           const struct taking *taking, const void *taker)
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
        int32_t(*whole)[PANEL] = tiling->whole;
        /* Each row of a tile begins with the same: rows that are 0 bytes apart. */
        _tile_loadd(0, weights, 0);
        _tile_loadd(1, weights + 64, 0);
        if (is_fine) {
            _tile_loadd(2, weights + VECTOR, 0);
            _tile_loadd(3, weights + VECTOR + 64, 0);
        } else if (is_two) {
            _tile_loadd(2, weights, 0);
            _tile_loadd(3, weights + 64, 0);
        }
        weights += is_fine ? 2 * VECTOR : VECTOR;
        for (long k = 0; k < length; k += TURNED, weights += TURNED * PANEL) {
            _tile_stream_loadd(4, values + k, width);
            _tile_loadd(6, weights, VECTOR);
            _tile_loadd(7, weights + 64, VECTOR);
            if (is_fine || is_two)
                _tile_stream_loadd(5, others + k, width);
            _tile_dpbusd(0, 4, 6);
            _tile_dpbusd(1, 4, 7);
            if (is_fine || is_two) {
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
            finish_rows(tiling, count);
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
        scale_rows *const between = is_fine ? (g ? scale_fine_next : scale_fine_first) : g ? scale_next : scale_first;
        tiling->waiting = (struct sums){.scale = g < groups - 1 ? between : taking->scale[is_fine][g == 0],
                                        .whole = (const int32_t(*)[PANEL])whole,
                                        .sum = tiling->sum,
                                        .scales = x->scales + t * groups + g,
                                        .panel = panel,
                                        .groups = groups,
                                        .t = t,
                                        .from = from,
                                        .to = to,
                                        .columns = columns,
                                        .taker = taker};
    }
}

/* Rows start .. stop of all `rows`. Tiles are whole where there are rows for that: the last may take some again, whose
 * sums nobody wants. */
INLINE void tile_rows(struct tiling *tiling, struct ahead *ahead, const int is_fine, const struct quantized *x,
                      long rows, const char *panel, long width, long start, long stop, struct columns columns,
                      const struct taking *taking, const void *taker)
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
        multiply_tiles(tiling, ahead, is_fine, x, panel, width, t - from, from, from + wanted, columns, taking, taker);
    }
}

/* What is left to be done; the caller's barrier comes behind it. */
INLINE void end_products(struct tiling *tiling)
{
    finish_rows(tiling, TILED_ROWS);
    if (tiling->shapes.rows[0])
        _tile_release();
}
#else
#define TAKING(name, type, take) static const struct taking name = {take, {{NULL, NULL}, {NULL, NULL}}};
struct tiling {
    int is_empty;
};
INLINE void begin_products(struct tiling *tiling) { tiling->is_empty = 1; }
INLINE void end_products(struct tiling *tiling) { (void)tiling; }
#endif

/* What is fetched beside a panel's product with so many rows; behind the last panel there is nothing to harm. */
INLINE struct ahead next_panel(const char *panel, long bytes, long width, long rows, long at_a_time)
{
    const long steps = (rows + at_a_time - 1) / at_a_time * (width / TURNED);
    return (struct ahead){panel + bytes, (bytes / 64 + steps - 1) / steps};
}

/* Rows start .. stop of all `rows` with panel `at` of a layer's bytes, or of its fine bytes. */
INLINE void multiply_panel(struct tiling *tiling, const int is_fine, const struct quantized *x, long rows,
                           const struct packed *w, long at, long start, long stop, struct columns columns,
                           const struct taking *taking, const void *taker)
{
    const long width = w->width, bytes = is_fine ? fine_panel_bytes(width) : panel_bytes(width);
    const long together = is_fine ? FINE_ROWS : ROWS;
    const char *const panel = (is_fine ? w->fine : w->bytes) + at * bytes;
#ifdef __AMX_INT8__
    if (batchinfer_tiles && rows >= LEAST_TILED) {
        const long at_a_time = least(rows, is_fine ? TILE_ROWS : TILED_ROWS);
        struct ahead ahead = next_panel(panel, bytes, width, stop - start, at_a_time);
        tile_rows(tiling, &ahead, is_fine, x, rows, panel, width, start, stop, columns, taking, taker);
        return;
    }
#endif
    struct ahead ahead = next_panel(panel, bytes, width, stop - start, together);
    for (long t = start; t < stop; t += together) {
        const long here = least(together, stop - t);
        __m512 sum[ROWS][2];
        if (is_fine)
            fine_rows(here, &ahead, x, t, panel, width, sum);
        else
            bytes_rows(here, &ahead, x, t, panel, width, sum);
        for (long r = 0; r < here; r++)
            taking->take(taker, columns, t + r, sum[r][0], sum[r][1]);
    }
}

/* And of its bfloat16. */
INLINE void multiply_plain_panel(const struct quantized *x, const struct packed *w, long at, long start, long stop,
                                 struct columns columns, const struct taking *taking, const void *taker)
{
    for (long t = start; t < stop; t += ROWS) {
        const long here = least(ROWS, stop - t);
        __m512 sum[ROWS][2];
        plain_rows(here, x, t, w->plain + at * w->width * PANEL, w->width, sum);
        for (long r = 0; r < here; r++)
            taking->take(taker, columns, t + r, sum[r][0], sum[r][1]);
    }
}

#endif
