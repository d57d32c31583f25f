/* Which output of a wide bfloat16 layer is the largest, of most outputs without computing them.
 *
 * An approximation of each output is had from bytes at half the cost, and a bound of its error from Cauchy and Schwarz:
 * |x.w - x'.w'| <= |x - x'| |w| + |x'| |w - w'|. Only what can still be the largest is computed in bfloat16, by the very
 * operations of the layer itself, so that the answer is that of all outputs.
 */

#include <float.h>
#include <math.h>
#include <omp.h>

#include "panels.h"

enum { CANDIDATES = 504 };

/* Of one row, what one thread has seen. `floor`: some output is at least that. */
struct shortlist {
    float floor;
    int32_t count, overflow;
    int32_t index[CANDIDATES];
    float ceiling[CANDIDATES];
};

/* A row's |x - x'| and |x'|; float32's own rounding is covered by the slack, which is far above it. */
struct spread {
    float error, length;
};

static const float SLACK = 1.001f;

INLINE __m512 from_bf16(__m256i x) { return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16); }

/* ---- Packing ---- */

/* plain: bfloat16 [features, width]. To bytes, as in panels.h, with |w| and |w - w'| of each feature, which are not finite
 * where a weight is not: such bytes are of no use. */
void batchinfer_pack_shortlist(const uint16_t *plain, long features, long width, int8_t *values, float *scales,
                               int32_t *offsets, float *lengths, float *errors, int threads)
{
    const long groups = width / GROUP;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long n = 0; n < features; n++) {
        const long panel = n / PANEL, lane = n % PANEL;
        int8_t *panel_values = values + panel * width * PANEL + lane * 4;
        double length = 0.0, error = 0.0;
        for (long g = 0; g < groups; g++) {
            float weight[GROUP], largest = 0.0f;
            for (int i = 0; i < GROUP; i += 16)
                _mm512_storeu_ps(weight + i, from_bf16(_mm256_loadu_si256((const void *)(plain + n * width + g * GROUP + i))));
            for (int i = 0; i < GROUP; i++)
                largest = fmaxf(largest, fabsf(weight[i]));
            const float scale = largest / 127.0f;
            int32_t sum = 0;
            for (int i = 0; i < GROUP; i++) {
                const long k = g * GROUP + i;
                const float steps = scale < FLT_MIN ? 0.0f : rintf(weight[i] / scale);
                const float whole = isfinite(steps) ? steps : 0.0f;
                panel_values[k / 4 * 4 * PANEL + k % 4] = (int8_t)whole;
                sum += (int32_t)whole;
                const float off = weight[i] - whole * scale;
                length += (double)weight[i] * weight[i];
                error += (double)off * off;
            }
            scales[(panel * groups + g) * PANEL + lane] = scale;
            offsets[(panel * groups + g) * PANEL + lane] = -sum;
        }
        lengths[n] = (float)sqrt(length) * SLACK;
        errors[n] = (float)sqrt(error) * SLACK;
    }
}

/* ---- Looking ---- */

static struct spread spread_of(const struct quantized *x, long t, long width)
{
    const long groups = width / GROUP;
    __m512 error = _mm512_setzero_ps(), length = error;
    for (long k = 0; k < width; k += 16) {
        const long of_row = t * groups + k / GROUP;
        const __m512i value = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)(x->values + t * width + k)));
        const __m512 whole = _mm512_cvtepi32_ps(_mm512_sub_epi32(value, _mm512_set1_epi32(x->zeros[of_row])));
        const __m512 near = _mm512_mul_ps(whole, _mm512_set1_ps(x->scales[of_row]));
        const __m512 off = _mm512_sub_ps(from_bf16(_mm256_loadu_si256((const void *)(x->plain + t * width + k))), near);
        error = _mm512_fmadd_ps(off, off, error);
        length = _mm512_fmadd_ps(near, near, length);
    }
    /* An output is a sum of `width` products, each addition rounded by up to 2^-24 of what all of them can come to; that
     * of the bytes has fewer roundings. Twice that. */
    const float norm = sqrtf(_mm512_reduce_add_ps(length)), rounding = (float)width * 0x1p-23f;
    return (struct spread){(sqrtf(_mm512_reduce_add_ps(error)) + rounding * norm) * SLACK, norm * SLACK};
}

static void drop_hopeless(struct shortlist *list)
{
    int32_t kept = 0;
    for (int32_t i = 0; i < list->count; i++)
        if (list->ceiling[i] >= list->floor) {
            list->index[kept] = list->index[i];
            list->ceiling[kept++] = list->ceiling[i];
        }
    list->count = kept;
}

static void add_candidates(struct shortlist *list, __mmask16 some, __m512 near, __m512 bound, int32_t first)
{
    float ceiling[16];
    list->floor = fmaxf(list->floor, _mm512_mask_reduce_max_ps(some, _mm512_sub_ps(near, bound)));
    _mm512_storeu_ps(ceiling, _mm512_add_ps(near, bound));
    for (; some; some &= some - 1) {
        const int lane = __builtin_ctz(some);
        if (list->count == CANDIDATES)
            drop_hopeless(list);
        if (list->count == CANDIDATES) {
            list->overflow = 1;
            return;
        }
        list->index[list->count] = first + lane;
        list->ceiling[list->count++] = ceiling[lane];
    }
}

/* One output of one row, as the layer computes it. */
static float exact(const struct quantized *x, long t, const struct packed *w, long n)
{
    const uint16_t *weights = w->plain + n / PANEL * w->width * PANEL + n % PANEL / 16 * 32;
    __m512 sum = _mm512_setzero_ps();
    for (long k = 0; k < w->width; k += 2)
        sum = dot_pairs(sum, _mm512_set1_epi32(four_bytes(x->plain + t * w->width + k)),
                        _mm512_loadu_si512(weights + k * PANEL));
    float outputs[16];
    _mm512_storeu_ps(outputs, sum);
    return outputs[n % 16];
}

struct best {
    float value;
    int64_t index;
};

static struct best better(struct best best, float value, int64_t index)
{
    const int is_better = value > best.value || (value == best.value && index < best.index);
    return is_better ? (struct best){value, index} : best;
}

static struct best best_of_all(const struct quantized *x, long t, const struct packed *w)
{
    struct best best = {-INFINITY, INT64_MAX};
    for (long panel = 0; panel < panels_of(w->num_plain); panel++) {
        __m512 sum[ROWS][2];
        float outputs[PANEL];
        plain_tile(1, x, t, w, panel, sum);
        _mm512_storeu_ps(outputs, sum[0][0]);
        _mm512_storeu_ps(outputs + 16, sum[0][1]);
        for (long n = panel * PANEL; n < least(w->num_plain, (panel + 1) * PANEL); n++)
            best = better(best, outputs[n % PANEL], n);
    }
    return best;
}

/* Of one row's lists, one from each thread. */
static struct best best_of_lists(const struct quantized *x, long t, const struct packed *w, struct shortlist *lists,
                                 long stride, int threads)
{
    float floor = -INFINITY, highest = -INFINITY;
    int64_t first = -1;
    for (int i = 0; i < threads; i++) {
        if (lists[i * stride].overflow)
            return best_of_all(x, t, w);
        floor = fmaxf(floor, lists[i * stride].floor);
    }
    for (int i = 0; i < threads; i++) {
        struct shortlist *list = lists + i * stride;
        list->floor = floor;
        drop_hopeless(list);
        for (int32_t c = 0; c < list->count; c++)
            if (list->ceiling[c] > highest) {
                highest = list->ceiling[c];
                first = list->index[c];
            }
    }
    if (first < 0) /* nothing is above -FLT_MAX */
        return best_of_all(x, t, w);
    /* The likeliest comes first: it rules out most others. */
    struct best best = {exact(x, t, w, first), first};
    for (int i = 0; i < threads; i++)
        for (int32_t c = 0; c < lists[i * stride].count; c++)
            if (lists[i * stride].ceiling[c] >= best.value && lists[i * stride].index[c] != first)
                best = better(best, exact(x, t, w, lists[i * stride].index[c]), lists[i * stride].index[c]);
    return best;
}

/* Of `batchinfer_largest`'s scratch. */
long batchinfer_largest_scratch_bytes(long rows, int threads)
{
    return rows * (long)(threads * sizeof(struct shortlist) + sizeof(struct spread));
}

/* index [rows]: where the plain features of x W^T are largest, the lowest among equals; finite [rows]: whether the row
 * and that output are finite. x has values and plain; the bytes of w stand for the same features. scratch: lists of
 * [threads][rows], then spreads of [rows]. */
void batchinfer_largest(const struct quantized *x, long rows, const struct packed *w, const float *lengths,
                        const float *errors, int64_t *index, uint8_t *finite, struct shortlist *scratch, int threads)
{
    const long panels = panels_of(w->num_plain), blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
    struct spread *spreads = (struct spread *)(scratch + threads * rows);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (long t = 0; t < rows; t++) {
            spreads[t] = spread_of(x, t, w->width);
            for (int i = 0; i < threads; i++) {
                scratch[i * rows + t].floor = -FLT_MAX;
                scratch[i * rows + t].count = scratch[i * rows + t].overflow = 0;
            }
        }
#pragma omp for collapse(2) schedule(dynamic, 4)
        for (long block = 0; block < blocks; block++)
            for (long panel = 0; panel < panels; panel++) {
                struct shortlist *lists = scratch + omp_get_thread_num() * rows;
                const long first = panel * PANEL, stop = least(rows, (block + 1) * ROW_BLOCK);
                const __mmask16 there[2] = {lanes(first, w->num_plain), lanes(first + 16, w->num_plain)};
                for (long t = block * ROW_BLOCK; t < stop; t += ROWS) {
                    const long here = least(ROWS, stop - t);
                    __m512 sum[ROWS][2];
                    bytes_tile(here, x, t, w, panel, sum);
                    for (long r = 0; r < here; r++) {
                        const __m512 error = _mm512_set1_ps(spreads[t + r].error);
                        const __m512 length = _mm512_set1_ps(spreads[t + r].length);
                        struct shortlist *list = lists + t + r;
                        for (int half = 0; half < 2; half++) {
                            const long from = first + 16 * half;
                            const __m512 bound = _mm512_fmadd_ps(error, _mm512_loadu_ps(lengths + from),
                                                                 _mm512_mul_ps(length, _mm512_loadu_ps(errors + from)));
                            const __m512 ceiling = _mm512_add_ps(sum[r][half], bound);
                            const __mmask16 some = _mm512_mask_cmp_ps_mask(
                                there[half], ceiling, _mm512_set1_ps(list->floor), _CMP_GE_OQ);
                            if (some && !list->overflow)
                                add_candidates(list, some, sum[r][half], bound, (int32_t)from);
                        }
                    }
                }
            }
#pragma omp for schedule(dynamic, 1)
        for (long t = 0; t < rows; t++) {
            const int is_finite = isfinite(spreads[t].error) && isfinite(spreads[t].length);
            struct best best = {NAN, 0};
            if (is_finite)
                best = best_of_lists(x, t, w, scratch + t, rows, threads);
            finite[t] = isfinite(best.value);
            index[t] = finite[t] ? best.index : 0;
        }
    }
}
