/* Linear layers over activations in bytes; int8.py says how these are called, panels.h how weights are packed. */

#include <omp.h>

#include "layers.h"
#include "products.h"

enum { ITEMS = 16, LEAST_ROWS = 48, ROWS_AT_ONCE = 4 };

/* How the rows of a product are handed out: `blocks` of `block` rows, whose activations stay in the second-level cache
 * while all panels pass by, in `pieces` of `piece` rows. All even, and multiples of the rows that are worked on
 * at a time, which so are seldom fewer. */
struct cut {
    long blocks, block, pieces, piece;
};

INLINE long even(long rows, long parts)
{
    const long at_a_time = rows_at_a_time();
    return (rows + parts * at_a_time - 1) / (parts * at_a_time) * at_a_time;
}

/* `columns`: how many pieces of work each row is in. Enough items are made for each thread to have ITEMS of them, where
 * rows allow it, so that all are done at about the same time. */
static struct cut cut_rows(long rows, long columns)
{
    struct cut cut = {0, 0, 0, 0};
    if (!rows || !columns)
        return cut;
    cut.block = even(rows, (rows + ROW_BLOCK - 1) / ROW_BLOCK);
    cut.blocks = (rows + cut.block - 1) / cut.block;
    const long items = cut.blocks * columns, wanted = (ITEMS * omp_get_num_threads() + items - 1) / items;
    const long most = cut.block / LEAST_ROWS;
    cut.piece = even(cut.block, most < 1 ? 1 : least(wanted, most));
    cut.pieces = (cut.block + cut.piece - 1) / cut.piece;
    return cut;
}

/* Which rows an item is of: none where the last block is shorter than others. */
struct span {
    long start, stop;
};

INLINE struct span rows_of(const struct cut *cut, long rows, long block, long piece)
{
    const long start = block * cut->block + piece * cut->piece;
    return (struct span){start, least(rows, least((block + 1) * cut->block, start + cut->piece))};
}

struct linear {
    float *y;
    const float *bias;
    long width;
    int add;
};

INLINE void take_half(const struct linear *linear, long column, long end, long t, __m512 value)
{
    const __mmask16 some = lanes(column, end);
    float *to = linear->y + t * linear->width + column;
    if (linear->bias)
        value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(some, linear->bias + column));
    if (linear->add)
        value = _mm512_add_ps(_mm512_maskz_loadu_ps(some, to), value);
    _mm512_mask_storeu_ps(to, some, value);
}

INLINE void take_linear(const void *taker, struct columns columns, long t, __m512 first, __m512 second)
{
    take_half(taker, columns.first, columns.end, t, first);
    take_half(taker, columns.first + 16, columns.end, t, second);
}

void batchinfer_linear_part(const struct quantized *x, long rows, const struct packed *w, const float *bias, float *y,
                            int add)
{
    const long plain = panels_of(w->num_plain), fine = panels_of(w->num_fine), bytes = panels_of(w->num_values);
    const long fine_from = w->num_values, plain_from = fine_from + w->num_fine, width = plain_from + w->num_plain;
    const struct linear linear = {y, bias, width, add};
    const struct cut cut = cut_rows(rows, plain + fine + bytes);
    struct tiling tiling;
    begin_products(&tiling);
    /* Those that take longer come first: what is begun last should be short. */
#pragma omp for collapse(3) schedule(dynamic, 1) nowait
    for (long block = 0; block < cut.blocks; block++)
        for (long at = 0; at < plain + fine + bytes; at++)
            for (long piece = 0; piece < cut.pieces; piece++) {
                const struct span span = rows_of(&cut, rows, block, piece);
                if (span.start >= span.stop)
                    continue;
                if (at < plain) {
                    const struct columns columns = {plain_from + at * PANEL, width};
                    multiply_plain_panel(x, w, at, span.start, span.stop, columns, take_linear, &linear);
                } else if (at < plain + fine) {
                    const struct columns columns = {fine_from + (at - plain) * PANEL, plain_from};
                    multiply_fine_panel(&tiling, x, rows, w, at - plain, span.start, span.stop, columns, take_linear,
                                        &linear);
                } else {
                    const struct columns columns = {(at - plain - fine) * PANEL, fine_from};
                    multiply_panel(&tiling, x, rows, w, at - plain - fine, span.start, span.stop, columns, take_linear,
                                   &linear);
                }
            }
    finish(&tiling, take_linear, &linear);
#pragma omp barrier
}

/* silu(x) = x / (1 + e^-x) */
INLINE __m512 silu(__m512 x)
{
    const __m512 power = exp2_of(_mm512_mul_ps(x, _mm512_set1_ps(-1.442695040888963f)));
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), power));
}

/* Of some groups of outputs, in rows of `stride`. */
struct gated {
    float *inner;
    const float *bias;
    long stride, first;
};

INLINE void take_gated(const void *taker, struct columns columns, long t, __m512 gate, __m512 up)
{
    const struct gated *gated = taker;
    if (gated->bias) {
        gate = _mm512_add_ps(gate, _mm512_loadu_ps(gated->bias + columns.first));
        up = _mm512_add_ps(up, _mm512_loadu_ps(gated->bias + columns.first + 16));
    }
    float *inner = gated->inner + t * gated->stride + columns.first / 2 - gated->first;
    _mm512_storeu_ps(inner, _mm512_mul_ps(silu(gate), up));
}

void batchinfer_gated_part(const struct quantized *x, long rows, const struct packed *w, const float *bias,
                           float *inner, const struct quantized *y)
{
    const long width = w->num_values / 2, group = group_of(width), groups = groups_of(width);
    /* Alone a thread makes a group at a time, which stays in its second-level cache; several would wait too often. */
    const long together = omp_get_num_threads() > 1 ? groups : 1, stride = gated_stride(least(width, together * group));
    for (long g = 0; g < groups; g += together) {
        const long first = g * group, end = least(width, first + together * group);
        const long from = first / 16, panels = (end - first) / 16;
        const struct gated gated = {inner, bias, stride, first};
        const struct cut cut = cut_rows(rows, panels);
        struct tiling tiling;
        begin_products(&tiling);
#pragma omp for collapse(3) schedule(dynamic, 1) nowait
        for (long block = 0; block < cut.blocks; block++)
            for (long panel = 0; panel < panels; panel++)
                for (long piece = 0; piece < cut.pieces; piece++) {
                    const struct span span = rows_of(&cut, rows, block, piece);
                    if (span.start >= span.stop)
                        continue;
                    const struct columns columns = {(from + panel) * PANEL, w->num_values};
                    multiply_panel(&tiling, x, rows, w, from + panel, span.start, span.stop, columns, take_gated,
                                   &gated);
                }
        finish(&tiling, take_gated, &gated);
#pragma omp barrier
#pragma omp for schedule(dynamic, ROWS_AT_ONCE)
        for (long t = 0; t < rows; t++)
            quantize_groups(inner + t * stride, NULL, 1.0f, end - first, width, g, least(groups, g + together), y, t);
    }
}

void batchinfer_int8_linear(const struct quantized *x, long rows, const struct packed *w, const float *bias, float *y,
                            int add, int threads)
{
#pragma omp parallel num_threads(threads)
    batchinfer_linear_part(x, rows, w, bias, y, add);
}

void batchinfer_int8_gated(const struct quantized *x, long rows, const struct packed *w, const float *bias,
                           float *inner, const struct quantized *y, int threads)
{
#pragma omp parallel num_threads(threads)
    batchinfer_gated_part(x, rows, w, bias, inner, y);
}
