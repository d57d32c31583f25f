/* Which output of a wide bfloat16 layer is the largest, of most outputs without computing them.
 *
 * An approximation of each output is had from bytes at half the cost, and a bound of its error from Cauchy and Schwarz:
 * |x.w - x'.w'| <= |x - x'| |w| + |x'| |w - w'|. Only what can still be the largest is computed in bfloat16, by the very
 * operations of the layer itself, so that the answer is that of all outputs.
 */

#include <float.h>
#include <math.h>
#include <omp.h>

#include "products.h"

enum { HALF = PANEL / 2 };

/* A row's |x - x'| and |x'|; float32's own rounding is covered by the slack, which is far above it. */
struct spread {
    float error, length;
};

static const float SLACK = 1.001f;

INLINE __m512 from_bf16(__m256i x) { return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16); }

/* ---- Packing ---- */

/* Rounding of numbers that are turned comes to less, for each unit of their length. */
static const float TURNING = 0x1p-21f;

/* plain: bfloat16 [features, width]. To bytes, as in panels.h, with |w| and |w - w'| of each feature, which are not finite
 * where a weight is not: such bytes are of no use. scratch: [threads][width] of float32 and a byte each. */
void batchinfer_pack_shortlist(const uint16_t *plain, long features, long width, char *bytes, float *lengths,
                               float *errors, char *scratch, int threads)
{
    const long group = group_of(width);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long n = 0; n < features; n++) {
        const long lane = n % PANEL;
        float *weight = (float *)(scratch + omp_get_thread_num() * width * 5);
        int8_t *values = (int8_t *)(weight + width);
        char *to = bytes + n / PANEL * panel_bytes(width) + lane * 4;
        float scale;
        double length = 0.0, error = 0.0;
        for (long k = 0; k < width; k += 16)
            _mm512_storeu_ps(weight + k, from_bf16(_mm256_loadu_si256((const void *)(plain + n * width + k))));
        batchinfer_quantize_weight_row(weight, width, weight, values, NULL, &scale);
        memcpy(to, &scale, 4);
        to += VECTOR;
        for (long at = 0; at < width; at += group) {
            const long stop = least(width, at + group);
            int32_t sum = 0;
            for (long k = at; k < stop; k++) {
                const float off = weight[k] - values[k] * scale;
                sum -= ZERO * values[k];
                length += (double)weight[k] * weight[k];
                error += (double)off * off;
            }
            memcpy(to, &sum, 4);
            to += VECTOR;
            for (long k = at; k < stop; k += 4, to += 4 * PANEL)
                memcpy(to, values + k, 4);
        }
        lengths[n] = (float)sqrt(length) * SLACK;
        errors[n] = ((float)sqrt(error) + TURNING * lengths[n]) * SLACK;
    }
}

/* ---- Looking ---- */

static struct spread spread_of(const struct quantized *x, long t, long width)
{
    const long group = group_of(width);
    const float *scales = x->scales + t * groups_of(width);
    __m512 error = _mm512_setzero_ps(), length = error;
    for (long at = 0; at < width; at += TURNED) {
        const __m512 scale = _mm512_set1_ps(scales[at / group]);
        const uint8_t *values = x->values + t * width + at;
        const uint16_t *plain = x->plain + t * width + at;
        __m512 turned[BLOCK_REGISTERS];
        for (int i = 0; i < BLOCK_REGISTERS; i++)
            turned[i] = from_bf16(_mm256_loadu_si256((const void *)(plain + 16 * i)));
        turn_four(turned);
        for (int i = 0; i < BLOCK_REGISTERS; i++) {
            const __m512i value = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)(values + 16 * i)));
            const __m512 near = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(value, _mm512_set1_epi32(ZERO))), scale);
            const __m512 off = _mm512_fmsub_ps(turned[i], _mm512_set1_ps(TURNED_FACTOR), near);
            error = _mm512_fmadd_ps(off, off, error);
            length = _mm512_fmadd_ps(near, near, length);
        }
    }
    /* An output is a sum of `width` products, each addition rounded by up to 2^-24 of what all of them can come to; that
     * of the bytes has fewer roundings. Twice that. */
    const float norm = sqrtf(_mm512_reduce_add_ps(length)), rounding = (float)width * 0x1p-23f + TURNING;
    return (struct spread){(sqrtf(_mm512_reduce_add_ps(error)) + rounding * norm) * SLACK, norm * SLACK};
}

struct best {
    float value;
    int64_t index;
};

/* The better of `best` and of half a panel's outputs, which are computed as the layer does. */
static struct best better(struct best best, const struct quantized *x, long t, const struct packed *w, int32_t first)
{
    const uint16_t *weights = w->plain + first / PANEL * w->width * PANEL + first % PANEL * 2;
    __m512 sum = _mm512_setzero_ps();
    for (long k = 0; k < w->width; k += 2)
        sum = dot_pairs(sum, _mm512_set1_epi32(four_bytes(x->plain + t * w->width + k)),
                        _mm512_loadu_si512(weights + k * PANEL));
    float outputs[HALF];
    _mm512_storeu_ps(outputs, sum);
    for (int i = 0; i < HALF && first + i < w->num_plain; i++)
        if (outputs[i] > best.value || (outputs[i] == best.value && first + i < best.index))
            best = (struct best){outputs[i], first + i};
    return best;
}

/* Halves of panels, each of which one register holds; so many that registers of ceilings are full, an odd number: rows
 * an even one apart got in each other's way in the caches. */
INLINE long halves_of(const struct packed *w) { return ((2 * panels_of(w->num_plain) + HALF - 1) / HALF * HALF) | HALF; }

/* The better of `best` and of halves whose ceilings are at least `from`, no lower than the best, and not `done`. */
static struct best better_of_halves(struct best best, const struct quantized *x, long t, const struct packed *w,
                                    const float *ceilings, float from, float done)
{
    for (long half = 0; half < halves_of(w); half += HALF) {
        const __m512 ceiling = _mm512_loadu_ps(ceilings + half), limit = _mm512_set1_ps(fmaxf(from, best.value));
        unsigned some = _mm512_cmp_ps_mask(ceiling, limit, _CMP_GE_OQ) &
                        _mm512_cmp_ps_mask(ceiling, _mm512_set1_ps(done), _CMP_NEQ_UQ);
        for (; some; some &= some - 1) {
            const long at = half + __builtin_ctz(some);
            if (ceilings[at] >= best.value)
                best = better(best, x, t, w, (int32_t)at * HALF);
        }
    }
    return best;
}

static struct best best_of_row(const struct quantized *x, long t, const struct packed *w, const float *ceilings)
{
    __m512 highest = _mm512_loadu_ps(ceilings);
    for (long half = HALF; half < halves_of(w); half += HALF)
        highest = _mm512_max_ps(highest, _mm512_loadu_ps(ceilings + half));
    const float likeliest = _mm512_reduce_max_ps(highest);
    struct best best = {-INFINITY, INT64_MAX};
    if (likeliest == -INFINITY) { /* nothing is above -FLT_MAX */
        for (long first = 0; first < w->num_plain; first += HALF)
            best = better(best, x, t, w, (int32_t)first);
        return best;
    }
    /* It comes first: it rules out most others. */
    best = better_of_halves(best, x, t, w, ceilings, likeliest, NAN);
    return better_of_halves(best, x, t, w, ceilings, -FLT_MAX, likeliest);
}

/* Of `batchinfer_largest`'s scratch: a 16th of what the outputs themselves would take, and what is small. */
long batchinfer_largest_scratch_bytes(long rows, const struct packed *w, int threads)
{
    return rows * ((halves_of(w) + threads) * (long)sizeof(float) + (long)sizeof(struct spread));
}

/* What the outputs of bytes say of rows; ceilings and floors are the largest's, see there. */
struct looking {
    const struct spread *spreads;
    const float *lengths, *errors;
    float *ceilings, *floors;
    long halves;
};

INLINE void look_at_half(const struct looking *looking, long column, long end, long t, __m512 sum)
{
    const __m512 error = _mm512_set1_ps(looking->spreads[t].error);
    const __m512 length = _mm512_set1_ps(looking->spreads[t].length);
    const __m512 bound = _mm512_fmadd_ps(error, _mm512_loadu_ps(looking->lengths + column),
                                         _mm512_mul_ps(length, _mm512_loadu_ps(looking->errors + column)));
    const __m512 ceiling = _mm512_add_ps(sum, bound);
    float *const floor = looking->floors + t;
    const __mmask16 some = _mm512_mask_cmp_ps_mask(lanes(column, end), ceiling, _mm512_set1_ps(*floor), _CMP_GE_OQ);
    if (some) {
        *floor = fmaxf(*floor, _mm512_mask_reduce_max_ps(some, _mm512_sub_ps(sum, bound)));
        looking->ceilings[t * looking->halves + column / HALF] = _mm512_mask_reduce_max_ps(some, ceiling);
    }
}

INLINE void look(const void *taker, struct columns columns, long t, __m512 first, __m512 second)
{
    look_at_half(taker, columns.first, columns.end, t, first);
    look_at_half(taker, columns.first + HALF, columns.end, t, second);
}

TAKING(looked, struct looking, look)

/* index [rows]: where the plain features of x W^T are largest, the lowest among equals; finite [rows]: whether the row
 * and that output are finite. x has values and plain; the bytes of w stand for the same features. scratch:
 * ceilings [rows][halves], what no output of a half is above, -infinity where the largest is not among them; floors
 * [threads][rows], what some output is at least; spreads [rows]. */
void batchinfer_largest(const struct quantized *x, long rows, const struct packed *w, const float *lengths,
                        const float *errors, int64_t *index, uint8_t *finite, void *scratch, int threads)
{
    const long panels = panels_of(w->num_plain), block = row_block(), blocks = (rows + block - 1) / block;
    const long halves = halves_of(w);
    float *all_ceilings = scratch, *all_floors = all_ceilings + rows * halves;
    struct spread *spreads = (struct spread *)(all_floors + threads * rows);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (long t = 0; t < rows; t++) {
            spreads[t] = spread_of(x, t, w->width);
            for (int i = 0; i < threads; i++)
                all_floors[i * rows + t] = -FLT_MAX;
            for (long half = 0; half < halves; half += HALF)
                _mm512_storeu_ps(all_ceilings + t * halves + half, _mm512_set1_ps(-INFINITY));
        }
        const struct looking looking = {spreads, lengths, errors, all_ceilings,
                                        all_floors + omp_get_thread_num() * rows, halves};
        struct tiling tiling;
        begin_products(&tiling);
#pragma omp for collapse(2) schedule(dynamic, 4) nowait
        for (long i = 0; i < blocks; i++)
            for (long panel = 0; panel < panels; panel++) {
                const struct columns columns = {panel * PANEL, w->num_plain};
                multiply_panel(&tiling, 0, x, rows, w, panel, i * block, least(rows, (i + 1) * block),
                               columns, &looked, &looking);
            }
        end_products(&tiling);
#pragma omp barrier
#pragma omp for schedule(dynamic, 1)
        for (long t = 0; t < rows; t++) {
            const int is_finite = isfinite(spreads[t].error) && isfinite(spreads[t].length);
            struct best best = {NAN, 0};
            if (is_finite)
                best = best_of_row(x, t, w, all_ceilings + t * halves);
            finite[t] = isfinite(best.value);
            index[t] = finite[t] ? best.index : 0;
        }
    }
}
