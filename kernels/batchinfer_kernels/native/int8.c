/* Linear layers over activations in bytes; int8.py says how these are called, panels.h how weights are packed. */

#include "layers.h"
#include "panels.h"

enum { PANELS_PER_GROUP = GROUP / 16 };

void batchinfer_linear_part(const struct quantized *x, long rows, const struct packed *w, const float *bias, float *y,
                            int add)
{
    const long bytes_panels = panels_of(w->num_values), panels = bytes_panels + panels_of(w->num_plain);
    const long blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK, columns = w->num_values + w->num_plain;
#pragma omp for collapse(2) schedule(dynamic, 1)
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

void batchinfer_gated_part(const struct quantized *x, long rows, const struct packed *w, const float *bias,
                           const struct quantized *y)
{
    const long groups = w->num_values / PANEL / PANELS_PER_GROUP, blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
#pragma omp for collapse(2) schedule(dynamic, 1)
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
