/* Linear layers over activations in bytes; int8.py says how these are called, panels.h how weights are packed. */

#include <omp.h>

#include "layers.h"
#include "panels.h"

enum { PANELS_PER_GROUP = GROUP / 16, ITEMS = 16, LEAST_ROWS = 48 };

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

void batchinfer_linear_part(const struct quantized *x, long rows, const struct packed *w, const float *bias, float *y,
                            int add)
{
    const long plain_panels = panels_of(w->num_plain), panels = plain_panels + panels_of(w->num_values);
    const long columns = w->num_values + w->num_plain;
    const struct cut cut = cut_rows(rows, panels);
    begin_tiles();
    /* Plain panels come first: they take twice as long, and what is begun last should be short. */
#pragma omp for collapse(3) schedule(dynamic, 1)
    for (long block = 0; block < cut.blocks; block++)
        for (long at = 0; at < panels; at++)
            for (long piece = 0; piece < cut.pieces; piece++) {
                const int is_plain = at < plain_panels;
                const long panel = is_plain ? at : at - plain_panels;
                const long first = is_plain ? w->num_values + panel * PANEL : panel * PANEL;
                const long end = is_plain ? columns : w->num_values;
                const __mmask16 some[2] = {lanes(first, end), lanes(first + 16, end)};
                __m512 shift[2];
                for (int half = 0; half < 2; half++)
                    shift[half] =
                        bias ? _mm512_maskz_loadu_ps(some[half], bias + first + 16 * half) : _mm512_setzero_ps();
                const long start = block * cut.block + piece * cut.piece;
                const long stop = least(rows, least((block + 1) * cut.block, start + cut.piece));
                if (start >= stop)
                    continue; /* the last block is shorter than others */
                struct ahead ahead = next_panel(w, panel, stop - start);
                const long step = is_plain ? ROWS : rows_at_a_time();
                for (long t = start; t < stop; t += step) {
                    const long here = least(step, stop - t);
                    __m512 sum[MOST_ROWS][2];
                    for (long r = 0; r < here; r++) { /* another core may have had these last */
                        __builtin_prefetch(y + (t + r) * columns + first, 1);
                        __builtin_prefetch(y + (t + r) * columns + first + 16, 1);
                    }
                    if (is_plain)
                        plain_tile(here, x, t, w, panel, sum);
                    else
                        bytes_tile(here, &ahead, x, t, w, panel, sum);
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
    end_tiles();
}

/* silu(x) = x / (1 + e^-x) */
INLINE __m512 silu(__m512 x)
{
    const __m512 power = exp2_of(_mm512_mul_ps(x, _mm512_set1_ps(-1.442695040888963f)));
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), power));
}

void batchinfer_gated_part(const struct quantized *x, long rows, const struct packed *w, const float *bias,
                           const struct quantized *y)
{
    const long panels = w->num_values / PANEL, width = panels * 16, groups = groups_of(width);
    const struct cut cut = cut_rows(rows, groups);
    const long step = rows_at_a_time();
    begin_tiles();
#pragma omp for collapse(3) schedule(dynamic, 1)
    for (long block = 0; block < cut.blocks; block++)
        for (long g = 0; g < groups; g++)
            for (long piece = 0; piece < cut.pieces; piece++) {
                float inner[ROW_BLOCK][GROUP];
                const long start = block * cut.block + piece * cut.piece;
                const long stop = least(rows, least((block + 1) * cut.block, start + cut.piece));
                if (start >= stop)
                    continue; /* the last block is shorter than others */
                const long first = g * PANELS_PER_GROUP, here = least(PANELS_PER_GROUP, panels - first);
                for (long p = 0; p < here; p++) {
                    const long panel = first + p;
                    struct ahead ahead = next_panel(w, panel, stop - start);
                    for (long t = start; t < stop; t += step) {
                        const long tile = least(step, stop - t);
                        __m512 sum[MOST_ROWS][2];
                        bytes_tile(tile, &ahead, x, t, w, panel, sum);
                        for (long r = 0; r < tile; r++) {
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
                    load_registers(inner[t - start], 16 * here, GROUP_REGISTERS, values);
                    store_group(values, y, t, g, width);
                }
            }
    end_tiles();
}

void batchinfer_int8_linear(const struct quantized *x, long rows, const struct packed *w, const float *bias, float *y,
                            int add, int threads)
{
#pragma omp parallel num_threads(threads)
    batchinfer_linear_part(x, rows, w, bias, y, add);
}

void batchinfer_int8_gated(const struct quantized *x, long rows, const struct packed *w, const float *bias,
                           const struct quantized *y, int threads)
{
#pragma omp parallel num_threads(threads)
    batchinfer_gated_part(x, rows, w, bias, y);
}
