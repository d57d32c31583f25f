/* Linear layers over activations in bytes; int8.py says how these are called, panels.h how weights are packed. */

#include <omp.h>

#include "layers.h"
#include "products.h"

/* AHEAD: rows that are taken later by about as much as a line takes to come from the second-level cache. */
enum { AHEAD = 8, ITEMS = 16, LEAST_ROWS = 48, ROWS_AT_ONCE = 4 };

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
    cut.block = even(rows, (rows + row_block() - 1) / row_block());
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
};

/* Half a panel's outputs, all of them there or not. */
INLINE void take_half(const int is_whole, const int add, const struct linear *linear, long column, long end, long t,
                      __m512 value)
{
    float *to = linear->y + t * linear->width + column;
    if (is_whole) {
        __builtin_prefetch(to + AHEAD * linear->width, 1);
        _mm512_storeu_ps(to, add ? _mm512_add_ps(_mm512_loadu_ps(to), value) : value);
        return;
    }
    const __mmask16 some = lanes(column, end);
    if (linear->bias)
        value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(some, linear->bias + column));
    if (add)
        value = _mm512_add_ps(_mm512_maskz_loadu_ps(some, to), value);
    _mm512_mask_storeu_ps(to, some, value);
}

#define TAKE_LINEAR(name, is_whole, add)                                                                              \
    INLINE void take_##name(const void *taker, struct columns columns, long t, __m512 first, __m512 second)           \
    {                                                                                                                 \
        take_half(is_whole, add, taker, columns.first, columns.end, t, first);                                        \
        take_half(is_whole, add, taker, columns.first + 16, columns.end, t, second);                                  \
    }                                                                                                                 \
    TAKING(name, struct linear, take_##name)
TAKE_LINEAR(set, 0, 0)
TAKE_LINEAR(added, 0, 1)
TAKE_LINEAR(whole_set, 1, 0)
TAKE_LINEAR(whole_added, 1, 1)

void batchinfer_linear_part(const struct quantized *x, long rows, const struct packed *w, const float *bias, float *y,
                            int add)
{
    const long plain = panels_of(w->num_plain), fine = panels_of(w->num_fine), bytes = panels_of(w->num_values);
    const long fine_from = w->num_values, plain_from = fine_from + w->num_fine, width = plain_from + w->num_plain;
    const struct linear linear = {y, bias, width};
    const struct taking *const some = add ? &added : &set, *const all = bias ? some : add ? &whole_added : &whole_set;
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
                const int is_plain = at < plain, is_fine = !is_plain && at < plain + fine;
                const long index = at - (is_plain ? 0 : is_fine ? plain : plain + fine);
                const long from = is_plain ? plain_from : is_fine ? fine_from : 0;
                const long end = is_plain ? width : is_fine ? plain_from : fine_from;
                const struct columns columns = {from + index * PANEL, end};
                const struct taking *const taking = columns.first + PANEL <= columns.end ? all : some;
                if (is_plain)
                    multiply_plain_panel(x, w, index, span.start, span.stop, columns, taking, &linear);
                else if (is_fine)
                    multiply_panel(&tiling, 1, x, rows, w, index, span.start, span.stop, columns, taking, &linear);
                else
                    multiply_panel(&tiling, 0, x, rows, w, index, span.start, span.stop, columns, taking, &linear);
            }
    end_products(&tiling);
#pragma omp barrier
}

static const float ROUNDS = 12582912.0f; /* 1.5 * 2^23: added to a number it leaves a whole one in the lowest bits */

/* sigmoid(-a) for a >= 0 within 7e-4 of it: polynomials of degree 2, the smallest relative error that these can have,
 * around multiples of SIGMOID_STEP, by degree. From the last of them on it stays what it is there. */
static const float SIGMOID_STEP = 0.5f;
static const float SIGMOID[3][32] = {
    {5.0001067e-1f, 3.7753522e-1f, 2.689422e-1f, 1.8243043e-1f, 1.1920924e-1f, 7.586384e-2f,
     4.743017e-2f, 2.931521e-2f, 1.798817e-2f, 1.098819e-2f, 6.69363e-3f, 4.0706187e-3f,
     2.4729182e-3f, 1.5013623e-3f, 9.1116084e-4f, 5.528453e-4f, 3.3539062e-4f, 2.0345156e-4f,
     1.234095e-4f, 7.485528e-5f, 4.540336e-5f, 2.7539023e-5f, 1.6703443e-5f, 1.0131217e-5f,
     6.144918e-6f, 3.7270902e-6f, 2.2605977e-6f, 1.3711231e-6f, 8.3162865e-7f, 5.0440843e-7f,
     3.0593924e-7f, 1.855542e-7f},
    {-2.5074404e-1f, -2.3425512e-1f, -1.9633538e-1f, -1.4926337e-1f, -1.0529245e-1f, -7.041764e-2f,
     -4.5431744e-2f, -2.8636022e-2f, -1.7785262e-2f, -1.0945101e-2f, -6.6976305e-3f, -4.0842937e-3f,
     -2.4853875e-3f, -1.5104695e-3f, -9.172545e-4f, -5.567514e-4f, -3.3783715e-4f, -2.0496393e-4f,
     -1.2433728e-4f, -7.542186e-5f, -4.574843e-5f, -2.7748842e-5f, -1.6830896e-5f, -1.0208592e-5f,
     -6.1918745e-6f, -3.7555803e-6f, -2.2778815e-6f, -1.3816075e-6f, -8.379882e-7f, -5.082659e-7f,
     -3.0827897e-7f, -1.8439863e-7f},
    {7.83182e-3f, 2.874961e-2f, 4.5163326e-2f, 4.7057483e-2f, 3.9736126e-2f, 2.9569456e-2f,
     2.0343464e-2f, 1.3330656e-2f, 8.4765935e-3f, 5.291491e-3f, 3.2661604e-3f, 2.0022232e-3f,
     1.2222833e-3f, 7.4426597e-4f, 4.5249585e-4f, 2.7484918e-4f, 1.6685054e-4f, 1.0125376e-4f,
     6.1433304e-5f, 3.726847e-5f, 2.260715e-5f, 1.37129155e-5f, 8.3176665e-6f, 5.045053e-6f,
     3.0600286e-6f, 1.8560191e-6f, 1.1257392e-6f, 6.8279775e-7f, 4.1413867e-7f, 2.5118814e-7f,
     1.5235342e-7f, 1.050188e-7f},
};

INLINE __m512 sigmoid_term(int degree, __m512i at)
{
    return _mm512_permutex2var_ps(_mm512_loadu_ps(SIGMOID[degree]), at, _mm512_loadu_ps(SIGMOID[degree] + 16));
}

/* silu(x) = x sigmoid(x) = max(x, 0) - |x| sigmoid(-|x|): it is rounded to steps of a 127th of the largest of its group
 * next. Exponential and division took twice as long. */
INLINE __m512 silu(__m512 x)
{
    const __m512 size = _mm512_abs_ps(x), rounds = _mm512_set1_ps(ROUNDS), step = _mm512_set1_ps(SIGMOID_STEP);
    const __m512 a = _mm512_min_ps(_mm512_set1_ps(31 * SIGMOID_STEP), size); /* of an unordered pair, the second */
    const __m512 whole = _mm512_fmadd_ps(a, _mm512_set1_ps(1 / SIGMOID_STEP), rounds);
    const __m512 part = _mm512_fnmadd_ps(_mm512_sub_ps(whole, rounds), step, a);
    const __m512i at = _mm512_castps_si512(whole);
    __m512 sum = _mm512_fmadd_ps(sigmoid_term(2, at), part, sigmoid_term(1, at));
    sum = _mm512_fmadd_ps(sum, part, sigmoid_term(0, at));
    return _mm512_fnmadd_ps(size, sum, _mm512_max_ps(_mm512_setzero_ps(), x));
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

TAKING(gated_outputs, struct gated, take_gated)

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
                    multiply_panel(&tiling, 0, x, rows, w, from + panel, span.start, span.stop, columns, &gated_outputs,
                                   &gated);
                }
        end_products(&tiling);
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
