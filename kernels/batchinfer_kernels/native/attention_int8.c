/* Attention's cache in int8: `kv8.py` of the package says what is computed.
 *
 * A block of one head: keys [dim / 4][LANES][4], as unsigned bytes 128 above their value, then float32 [LANES], their
 * scales; values [LANES / 4][dim][4], signed, then float32 [LANES], -log2 of their scales: exponents of weights take
 * these in. Products of queries and keys, and of weights and values, are sums of integers, exact in any order.
 */

#include "attention_int8.h"
#include "turn.h"

/* NO_VALUE: -log2 of a scale for zeros, so small that their weights do not make others' codes small. (With scales in
 * exponents, a token weighs nothing beside another whose values are 2^100 times as large.) ROOM: numbers of a
 * row's scores. */
enum { NO_VALUE = 64, ROOM = MAX_SPLIT + JOINED * LANES };

/* ---- Writing ---- */

/* Block of dimensions that are turned together: the largest power of two that divides the number of dimensions. */
INLINE int turned_together(int dim)
{
    return dim & -dim;
}

/* Walsh-Hadamard transform of each such block, not normalised. It leaves products of queries and keys as they are but
 * for a factor, and spreads what a few dimensions have too much of over all, which makes the steps of codes small. */
INLINE void turn(const float *x, float *turned, int dim)
{
    const int block = turned_together(dim) / LANES; /* registers */
    if (block < 4) {
        for (int i = 0; i < dim; i += block * LANES) {
            const __m512 first = turn_lanes(_mm512_loadu_ps(x + i));
            if (block == 1) {
                _mm512_store_ps(turned + i, first);
                continue;
            }
            const __m512 second = turn_lanes(_mm512_loadu_ps(x + i + LANES));
            _mm512_store_ps(turned + i, _mm512_add_ps(first, second));
            _mm512_store_ps(turned + i + LANES, _mm512_sub_ps(first, second));
        }
        return;
    }
    for (int i = 0; i < dim; i += 4 * LANES) {
        __m512 part[4];
        for (int j = 0; j < 4; j++)
            part[j] = _mm512_loadu_ps(x + i + j * LANES);
        turn_four(part);
        for (int j = 0; j < 4; j++)
            _mm512_store_ps(turned + i + j * LANES, part[j]);
    }
    for (int width = 4 * LANES; width < block * LANES; width *= 2)
        for (int i = 0; i < dim; i += 2 * width)
            for (int j = i; j < i + width; j += LANES) {
                const __m512 first = _mm512_load_ps(turned + j), second = _mm512_load_ps(turned + j + width);
                _mm512_store_ps(turned + j, _mm512_add_ps(first, second));
                _mm512_store_ps(turned + j + width, _mm512_sub_ps(first, second));
            }
}

/* What numbers are multiplied by to give codes, 0 for zeros; *step: what undoes it, NaN where one is not finite. */
INLINE float code_factor(const float *x, int dim, float *step)
{
    const __m512 none = _mm512_setzero_ps();
    __m512 most = none, sick = none;
    for (int i = 0; i < dim; i += LANES) {
        const __m512 part = _mm512_loadu_ps(x + i);
        most = _mm512_max_ps(most, _mm512_abs_ps(part));
        sick = _mm512_fmadd_ps(part, none, sick); /* NaN from NaN and from infinity */
    }
    const float top = _mm512_reduce_max_ps(most);
    const int is_sick = _mm512_cmp_ps_mask(sick, sick, _CMP_UNORD_Q) != 0;
    *step = is_sick ? NAN : top < LEAST ? 0.0f : top / MOST;
    return is_sick || top < LEAST ? 0.0f : MOST / top;
}

/* Codes of LANES numbers. */
INLINE __m128i codes_of(const float *x, float factor)
{
    const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(x), _mm512_set1_ps(factor));
    return _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(scaled));
}

/* Logarithm of a normal positive number, within 2^-24 of it or of 1: libraries' are not the same everywhere. */
static float log2_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    /* x = 2^exponent (1 + t) / (1 - t), t^2 < 0.03. */
    const int exponent = (int)((bits - 0x3F3504F3u) >> 23) - (bits < 0x3F3504F3u ? 512 : 0);
    bits -= (uint32_t)exponent << 23;
    float part;
    memcpy(&part, &bits, sizeof part);
    const double t = ((double)part - 1.0) / ((double)part + 1.0), square = t * t;
    const double sum = 1.0 + square * (1.0 / 3 + square * (1.0 / 5 + square * (1.0 / 7 + square * (1.0 / 9))));
    return (float)(exponent + 2.8853900817779268 * t * sum);
}

static void write_head(const float *key, const float *value, char *keys, char *values, int dim, int offset)
{
    float turned[MAX_HEAD_DIM] __attribute__((aligned(64)));
    turn(key, turned, dim);
    float key_step, value_step;
    const float key_factor = code_factor(turned, dim, &key_step), value_factor = code_factor(value, dim, &value_step);
    const int is_sick = isnan(key_step) || isnan(value_step);
    ((float *)scales_of(keys, dim))[offset] = is_sick ? NAN : key_step / turned_together(dim);
    ((float *)scales_of(values, dim))[offset] = is_sick || value_step == 0.0f ? NO_VALUE : -log2_of(value_step);
    const __mmask64 mine = 0x1111111111111111ull << offset % 4;
    for (int i = 0; i < dim; i += LANES) {
        uint32_t four[4];
        const __m128i biased = _mm_xor_si128(codes_of(turned + i, key_factor), _mm_set1_epi8((char)0x80));
        _mm_storeu_si128((__m128i *)four, biased);
        for (int j = 0; j < 4; j++)
            memcpy(keys + ((i / 4 + j) * LANES + offset) * 4, four + j, 4);
        const __m512i wide = _mm512_cvtepu8_epi32(codes_of(value + i, value_factor));
        const __m512i moved = _mm512_sll_epi32(wide, _mm_cvtsi32_si128(offset % 4 * 8));
        _mm512_mask_storeu_epi8(values + ((size_t)(offset / 4) * dim + i) * 4, mine, moved);
    }
}

/* A key is four bytes of each line of its block's, a value a byte in four of a row's. */
static void fetch_slot(const char *keys, const char *values, int dim, int offset)
{
    fetch_to_write(keys, dim * LANES + REGISTER);
    fetch_to_write(values + (size_t)(offset / 4) * dim * 4, dim * 4);
    fetch_to_write(scales_of(values, dim), REGISTER);
}

/* Codes [dim]; the scale of the scores, float32; what sums of products with keys that are 128 too high begin with,
 * int32. */
static void prepare_query(const float *query, char *prepared, int dim, float scale)
{
    float turned[MAX_HEAD_DIM] __attribute__((aligned(64))), step;
    turn(query, turned, dim);
    const float factor = code_factor(turned, dim, &step);
    __m512i sum = _mm512_setzero_si512();
    for (int i = 0; i < dim; i += LANES) {
        const __m128i codes = codes_of(turned + i, factor);
        _mm_storeu_si128((__m128i *)(prepared + i), codes);
        sum = _mm512_add_epi32(sum, _mm512_cvtepi8_epi32(codes));
    }
    const float score_scale = step == 0.0f ? 1.0f : step * scale; /* of zeros any will do */
    const int32_t start = -128 * _mm512_reduce_add_epi32(sum);
    memcpy(prepared + dim, &score_scale, sizeof score_scale);
    memcpy(prepared + dim + sizeof score_scale, &start, sizeof start);
}

/* Any codes are finite. */
static void clear_block(char *values, int dim)
{
    memset(values + (size_t)dim * LANES, 0, LANES * sizeof(float));
}

/* ---- A row block of a tile ---- */

/* Products of `num_rows` rows and `num_blocks` blocks of keys, both constants. keys[b + ahead] is fetched. */
INLINE void score_blocks(const int num_rows, const int num_blocks, const int8_t *queries, const int32_t *starts,
                         int dim, const char *const *keys, int ahead, float *scores, int stride)
{
    __m512i sum[ROWS][8];
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 8
        for (int b = 0; b < num_blocks; b++)
            sum[r][b] = _mm512_set1_epi32(starts[r]);
    for (int i = 0; i < dim / 4; i++) {
        __m512i key[8];
#pragma GCC unroll 8
        for (int b = 0; b < num_blocks; b++) {
            key[b] = _mm512_loadu_si512(keys[b] + i * REGISTER);
            _mm_prefetch(keys[b + ahead] + i * REGISTER, _MM_HINT_T1);
        }
#pragma GCC unroll 8
        for (int r = 0; r < num_rows; r++) {
            int32_t four;
            memcpy(&four, queries + r * MAX_HEAD_DIM + 4 * i, sizeof four);
            const __m512i query = _mm512_set1_epi32(four);
#pragma GCC unroll 8
            for (int b = 0; b < num_blocks; b++)
                sum[r][b] = dot_fours(sum[r][b], key[b], query);
        }
    }
#pragma GCC unroll 8
    for (int b = 0; b < num_blocks; b++) {
        _mm_prefetch((const char *)scales_of(keys[b + ahead], dim), _MM_HINT_T1);
#pragma GCC unroll 8
        for (int r = 0; r < num_rows; r++)
            _mm512_store_si512(scores + r * stride + b * LANES, sum[r][b]);
    }
}

INLINE void score_rows(const int num_rows, const int8_t *queries, const int32_t *starts, int dim,
                       const char *const *keys, int ahead, int begin, int end, float *scores, int stride)
{
    const int step = num_rows > 3 ? 4 : 8; /* enough sums at a time to hide the latency of one */
    int b = begin;
    for (; b + step <= end; b += step)
        score_blocks(num_rows, step, queries, starts, dim, keys + b, ahead, scores + b * LANES, stride);
    if (step == 8 && b + 4 <= end) {
        score_blocks(num_rows, 4, queries, starts, dim, keys + b, ahead, scores + b * LANES, stride);
        b += 4;
    }
    if (b + 2 <= end) {
        score_blocks(num_rows, 2, queries, starts, dim, keys + b, ahead, scores + b * LANES, stride);
        b += 2;
    }
    if (b < end)
        score_blocks(num_rows, 1, queries, starts, dim, keys + b, ahead, scores + b * LANES, stride);
}

/* Weighted values of `num_rows` rows in `num_parts` registers of dimensions from `from` on. values[b + ahead] is
 * fetched. */
INLINE void weigh_part(const int num_rows, const int num_parts, const uint8_t *weights, int stride,
                       const char *const *values, int ahead, int begin, int end, int dim, int from,
                       const struct row *rows, const float *factors)
{
    __m512i sum[ROWS][4];
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 8
        for (int i = 0; i < num_parts; i++)
            sum[r][i] = _mm512_setzero_si512();
    for (int b = begin; b < end; b++) {
        const char *block = values[b] + 4 * from, *fetched = values[b + ahead] + 4 * from;
        const uint8_t *mine = weights + (b - begin) / JOINED * TILE_BYTES + (b - begin) % JOINED * 4;
        for (int t = 0; t < LANES; t += 4) {
            __m512i value[4];
#pragma GCC unroll 8
            for (int i = 0; i < num_parts; i++) {
                value[i] = _mm512_loadu_si512(block + (size_t)t * dim + i * REGISTER);
                _mm_prefetch(fetched + (size_t)t * dim + i * REGISTER, _MM_HINT_T1);
            }
#pragma GCC unroll 8
            for (int r = 0; r < num_rows; r++) {
                int32_t four;
                memcpy(&four, mine + r * stride + t * JOINED, sizeof four);
                const __m512i weight = _mm512_set1_epi32(four);
#pragma GCC unroll 8
                for (int i = 0; i < num_parts; i++)
                    sum[r][i] = dot_fours(sum[r][i], weight, value[i]);
            }
        }
        _mm_prefetch((const char *)scales_of(values[b + ahead], dim), _MM_HINT_T1);
    }
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 8
        for (int i = 0; i < num_parts; i++)
            _mm512_storeu_ps(rows[r].out + from + i * LANES,
                             _mm512_mul_ps(_mm512_cvtepi32_ps(sum[r][i]), _mm512_set1_ps(factors[r])));
}

INLINE void weigh_rows(const int num_rows, const uint8_t *weights, int stride, const char *const *values, int ahead,
                       int begin, int end, int dim, const struct row *rows, const float *factors)
{
    int from = 0;
    for (; from + 4 * LANES <= dim; from += 4 * LANES)
        weigh_part(num_rows, 4, weights, stride, values, ahead, begin, end, dim, from, rows, factors);
    if (from + 2 * LANES <= dim) {
        weigh_part(num_rows, 2, weights, stride, values, ahead, begin, end, dim, from, rows, factors);
        from += 2 * LANES;
    }
    if (from < dim)
        weigh_part(num_rows, 1, weights, stride, values, ahead, begin, end, dim, from, rows, factors);
}

INLINE void softmax_rows(const int num_rows, const struct row *rows, struct row_block *block, float *sums, int stride,
                         uint8_t *codes, const struct work *work, int dim, float softcap)
{
    __m512 highest[ROWS], totals[ROWS];
    float inverse[ROOM] __attribute__((aligned(64)));
    const int begin = block->begin, end = block->end;
    sums += begin * LANES;
    for (int r = 0; r < num_rows; r++) {
        highest[r] = _mm512_set1_ps(-INFINITY);
        totals[r] = _mm512_setzero_ps();
    }
    for (int b = begin; b < end; b++) {
        const char *values = work->blocks[work->num_blocks + b];
        exponents_of_block(num_rows, num_rows, rows, block, b, sums + (b - begin) * LANES, stride, highest, work, dim,
                           softcap);
        _mm512_store_ps(inverse + (b - begin) * LANES, power_of(_mm512_loadu_ps(scales_of(values, dim)), 1.0f));
    }
    hide_behind(num_rows, end - begin, sums, stride);
    for (int b = end - begin; b % JOINED; b++)
        _mm512_store_ps(inverse + b * LANES, _mm512_setzero_ps());
    find_tops(num_rows, highest, block);
    for (int r = 0; r < num_rows; r++)
        for (int at = 0; at < (end - begin) * LANES; at += JOINED * LANES)
            _mm512_store_si512(codes + r * stride + at,
                               weigh_four(sums + r * stride + at, _mm512_set1_ps(block->tops[r]), inverse + at,
                                          totals + r));
    reduce_rows(num_rows, 0, totals, block->sums);
}

INLINE void attend_rows(const int num_rows, const struct row *rows, const struct work *work, int dim, float softcap)
{
    int8_t queries[ROWS * MAX_HEAD_DIM] __attribute__((aligned(64)));
    float scores[ROWS * ROOM] __attribute__((aligned(64)));
    uint8_t weights[ROWS * ROOM] __attribute__((aligned(64)));
    struct row_block block;
    const int ahead = work->num_blocks, stride = (ahead + JOINED) / JOINED * TILE_BYTES;
    for (int r = 0; r < num_rows; r++)
        fetch_results(rows + r, dim);
    load_rows(num_rows, rows, dim, queries, MAX_HEAD_DIM, &block);
    score_rows(num_rows, queries, block.starts, dim, work->blocks, ahead, block.begin, block.end, scores, stride);
    softmax_rows(num_rows, rows, &block, scores, stride, weights, work, dim, softcap);
    finish_rows(num_rows, rows, &block);
    weigh_rows(num_rows, weights, stride, work->blocks + ahead, ahead, block.begin, block.end, dim, rows,
               block.factors);
}

#define ATTEND(n)                                                                                                     \
    static void attend_##n(const struct row *rows, const struct work *work, int dim, float softcap)                   \
    {                                                                                                                 \
        attend_rows(n, rows, work, dim, softcap);                                                                     \
    }
ATTEND(1)
ATTEND(2)
ATTEND(3)
ATTEND(4)
ATTEND(5)
ATTEND(6)

/* Weights that are too small for normal numbers are 0: with denormals an instruction took 200 cycles. */
static _Thread_local unsigned kept_csr;

static int begin_attending(int dim)
{
    kept_csr = _mm_getcsr();
    _mm_setcsr(kept_csr | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON);
    if (!batchinfer_tiles || dim % TILE_BYTES)
        return ROWS;
    begin_tiles();
    return MOST_AT_ONCE;
}

static void attend(int num_rows, const struct row *rows, struct work *work, int dim, float softcap)
{
    static attend_rows_of *const by_rows[] = {NULL, attend_1, attend_2, attend_3, attend_4, attend_5, attend_6};
#ifdef __AMX_INT8__
    if (num_rows > ROWS) {
        const int rest = num_rows % MOST_ROWS <= ROWS ? num_rows % MOST_ROWS : 0, tiled = num_rows - rest;
        batchinfer_attend_int8_tiles(tiled, rows, work, dim, softcap);
        if (!rest)
            return;
        rows += tiled;
        num_rows = rest;
    }
#endif
    by_rows[num_rows](rows, work, dim, softcap);
}

static void end_attending(int at_a_time)
{
    if (at_a_time > ROWS)
        end_tiles();
    _mm_setcsr(kept_csr);
}

const struct format batchinfer_int8_format = {
    clear_block, write_head, fetch_slot, prepare_query, begin_attending, attend, end_attending};
