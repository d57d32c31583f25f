/* Attention's cache in bfloat16: rounded keys and values, multiplied with rounded queries and weights. */

#include "kv_format.h"

INLINE __mmask32 not_finite(__m512i bf16)
{
    const __m512i exponent = _mm512_set1_epi16(0x7F80);
    return _mm512_cmpeq_epi16_mask(_mm512_and_si512(bf16, exponent), exponent);
}

/* Dimensions i .. i + 31 of a head; zeros beyond its end. */
INLINE __m512i load_bf16(const float *x, int i, int dim, __m512 scale)
{
    const __m512 first = _mm512_loadu_ps(x + i);
    const __m512 second = i + LANES < dim ? _mm512_loadu_ps(x + i + LANES) : _mm512_setzero_ps();
    return to_bf16(_mm512_mul_ps(first, scale), _mm512_mul_ps(second, scale));
}

/* Keys: [dim / 2][LANES][2]; values: [LANES / 2][dim][2]. As `reference.kv_write` for non-finite numbers. */
static void write_head(const float *key, const float *value, char *keys, char *values, int dim, int offset)
{
    const __m512 one = _mm512_set1_ps(1.0f);
    __m512i k[MAX_HEAD_DIM / 32], v[MAX_HEAD_DIM / 32];
    __mmask32 sick = 0;
    for (int i = 0; i < dim; i += 32) {
        k[i / 32] = load_bf16(key, i, dim, one);
        v[i / 32] = load_bf16(value, i, dim, one);
        sick |= not_finite(k[i / 32]) | not_finite(v[i / 32]);
    }
    uint32_t *key_pair = (uint32_t *)keys + offset;
    uint16_t *pair_row = (uint16_t *)values + (size_t)(offset / 2) * dim * 2;
    const __mmask32 half = offset % 2 ? 0xAAAAAAAAu : 0x55555555u;
    for (int i = 0; i < dim; i += 32) {
        if (sick) {
            k[i / 32] = _mm512_set1_epi16(0x7FC0);
            v[i / 32] = _mm512_setzero_si512();
        }
        const int pairs = (dim - i < 32 ? dim - i : 32) / 2;
        uint32_t pair[LANES];
        _mm512_storeu_si512(pair, k[i / 32]);
        for (int p = 0; p < pairs; p++)
            key_pair[(i / 2 + p) * LANES] = pair[p];
        for (int j = 0; j < 2 * pairs; j += LANES) {
            const __m256i part = j ? _mm512_extracti64x4_epi64(v[i / 32], 1) : _mm512_castsi512_si256(v[i / 32]);
            const __m512i wide = _mm512_cvtepu16_epi32(part);
            /* Only this token's halves: another thread may be writing the pair's other token. */
            _mm512_mask_storeu_epi16(pair_row + 2 * (i + j), half, offset % 2 ? _mm512_slli_epi32(wide, 16) : wide);
        }
    }
}

static void clear_block(char *values, int dim)
{
    memset(values, 0, (size_t)dim * LANES * sizeof(uint16_t));
}

/* A key is a number or two of each line of its block's, a value a row of pairs. */
static void fetch_slot(const char *keys, const char *values, int dim, int offset)
{
    fetch_to_write(keys, dim * LANES * 2);
    fetch_to_write(values + (size_t)(offset / 2) * dim * 4, dim * 4);
}

static void prepare_query(const float *query, char *prepared, int dim, float scale)
{
    for (int i = 0; i < dim; i += 32) {
        const __mmask32 there = dim - i < 32 ? 0xFFFF : 0xFFFFFFFF;
        _mm512_mask_storeu_epi16(prepared + 2 * i, there, load_bf16(query, i, dim, _mm512_set1_ps(scale)));
    }
}

/* ---- A row block of a tile ---- */

/* Scores of `num_rows` rows and `num_blocks` blocks of keys, both constants. keys[b + ahead] is fetched. */
INLINE void score_blocks(const int num_rows, const int num_blocks, const uint16_t *queries, int pairs,
                         const char *const *keys, int ahead, float *scores)
{
    __m512 sum[ROWS][8];
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 8
        for (int b = 0; b < num_blocks; b++)
            sum[r][b] = _mm512_setzero_ps();
    for (int p = 0; p < pairs; p++) {
        __m512i key[8];
#pragma GCC unroll 8
        for (int b = 0; b < num_blocks; b++) {
            key[b] = _mm512_loadu_si512(keys[b] + p * REGISTER);
            _mm_prefetch(keys[b + ahead] + p * REGISTER, _MM_HINT_T1);
        }
#pragma GCC unroll 8
        for (int r = 0; r < num_rows; r++) {
            int32_t pair;
            memcpy(&pair, queries + r * MAX_HEAD_DIM + 2 * p, sizeof pair);
            const __m512i query = _mm512_set1_epi32(pair);
#pragma GCC unroll 8
            for (int b = 0; b < num_blocks; b++)
                sum[r][b] = dot_pairs(sum[r][b], key[b], query);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 8
        for (int b = 0; b < num_blocks; b++)
            _mm512_store_ps(scores + r * MAX_SPLIT + b * LANES, sum[r][b]);
}

INLINE void score_rows(const int num_rows, const uint16_t *queries, int pairs, const char *const *keys, int ahead,
                       int begin, int end, float *scores)
{
    const int step = num_rows > 3 ? 4 : 8; /* enough sums at a time to hide the latency of one */
    int b = begin;
    for (; b + step <= end; b += step)
        score_blocks(num_rows, step, queries, pairs, keys + b, ahead, scores + b * LANES);
    if (step == 8 && b + 4 <= end) {
        score_blocks(num_rows, 4, queries, pairs, keys + b, ahead, scores + b * LANES);
        b += 4;
    }
    if (b + 2 <= end) {
        score_blocks(num_rows, 2, queries, pairs, keys + b, ahead, scores + b * LANES);
        b += 2;
    }
    if (b < end)
        score_blocks(num_rows, 1, queries, pairs, keys + b, ahead, scores + b * LANES);
}

/* Weights of one row over blocks begin .. end, in bfloat16; its highest score and the sum of its weights. */
INLINE void softmax_row(const struct row *row, float *scores, uint16_t *weights, int begin, int end, float softcap,
                        float *top, float *sum)
{
    const __m512 nothing = _mm512_set1_ps(-INFINITY);
    __m512 highest = nothing;
    for (int b = begin; b < end; b++) {
        __m512 score = _mm512_load_ps(scores + b * LANES);
        if (softcap != 0.0f)
            score = _mm512_mul_ps(tanh_of(score), _mm512_set1_ps(softcap));
        score = _mm512_mask_mov_ps(nothing, seen_lanes(row, b * LANES), score);
        _mm512_store_ps(scores + b * LANES, score);
        highest = _mm512_max_ps(highest, score);
    }
    /* The bound only matters for a row that sees nothing but scores of -infinity. */
    *top = fmaxf(_mm512_reduce_max_ps(highest), -1e30f);
    const __m512 most = _mm512_set1_ps(*top);
    __m512 total = _mm512_setzero_ps();
    int b = begin;
    for (; b + 2 <= end; b += 2) {
        const __m512 first = exp2_of(_mm512_sub_ps(_mm512_load_ps(scores + b * LANES), most));
        const __m512 second = exp2_of(_mm512_sub_ps(_mm512_load_ps(scores + (b + 1) * LANES), most));
        total = _mm512_add_ps(_mm512_add_ps(total, first), second);
        _mm512_storeu_si512(weights + b * LANES, to_bf16(first, second));
    }
    if (b < end) {
        const __m512 last = exp2_of(_mm512_sub_ps(_mm512_load_ps(scores + b * LANES), most));
        total = _mm512_add_ps(total, last);
        _mm256_storeu_si256((__m256i *)(weights + b * LANES), _mm512_castsi512_si256(to_bf16(last, last)));
    }
    *sum = _mm512_reduce_add_ps(total);
}

/* Weighted values of `num_rows` rows in `num_parts` registers of dimensions from `from` on. values[b + ahead] is
 * fetched. */
INLINE void weigh_part(const int num_rows, const int num_parts, const uint16_t *weights, const char *const *values,
                       int ahead, int begin, int end, int dim, int from, const struct row *rows, const float *factors)
{
    __m512 sum[ROWS][4];
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 8
        for (int i = 0; i < num_parts; i++)
            sum[r][i] = _mm512_setzero_ps();
    for (int b = begin; b < end; b++) {
        const char *block = values[b] + 4 * from, *fetched = values[b + ahead] + 4 * from;
        for (int p = 0; p < LANES / 2; p++) {
            __m512i value[4];
#pragma GCC unroll 8
            for (int i = 0; i < num_parts; i++) {
                value[i] = _mm512_loadu_si512(block + (size_t)p * 4 * dim + i * REGISTER);
                _mm_prefetch(fetched + (size_t)p * 4 * dim + i * REGISTER, _MM_HINT_T1);
            }
#pragma GCC unroll 8
            for (int r = 0; r < num_rows; r++) {
                int32_t pair;
                memcpy(&pair, weights + r * MAX_SPLIT + b * LANES + 2 * p, sizeof pair);
                const __m512i weight = _mm512_set1_epi32(pair);
#pragma GCC unroll 8
                for (int i = 0; i < num_parts; i++)
                    sum[r][i] = dot_pairs(sum[r][i], value[i], weight);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 8
        for (int i = 0; i < num_parts; i++)
            _mm512_storeu_ps(rows[r].out + from + i * LANES, _mm512_mul_ps(sum[r][i], _mm512_set1_ps(factors[r])));
}

INLINE void weigh_rows(const int num_rows, const uint16_t *weights, const char *const *values, int ahead, int begin,
                       int end, int dim, const struct row *rows, const float *factors)
{
    int from = 0;
    for (; from + 4 * LANES <= dim; from += 4 * LANES)
        weigh_part(num_rows, 4, weights, values, ahead, begin, end, dim, from, rows, factors);
    if (from + 2 * LANES <= dim) {
        weigh_part(num_rows, 2, weights, values, ahead, begin, end, dim, from, rows, factors);
        from += 2 * LANES;
    }
    if (from < dim)
        weigh_part(num_rows, 1, weights, values, ahead, begin, end, dim, from, rows, factors);
}

INLINE void attend_rows(const int num_rows, const struct row *rows, const struct work *work, int dim, float softcap)
{
    uint16_t queries[ROWS * MAX_HEAD_DIM] __attribute__((aligned(64)));
    float scores[ROWS * MAX_SPLIT] __attribute__((aligned(64)));
    uint16_t weights[ROWS * MAX_SPLIT] __attribute__((aligned(64)));
    float factors[ROWS];
    int begin = MAX_BLOCKS, end = 0;
    for (int r = 0; r < num_rows; r++) {
        fetch_results(rows + r, dim);
        const int first = rows[r].first / LANES, last = rows[r].last / LANES + 1;
        begin = first < begin ? first : begin;
        end = last > end ? last : end;
    }
    for (int r = 0; r < num_rows; r++)
        memcpy(queries + r * MAX_HEAD_DIM, rows[r].query, dim * sizeof(uint16_t));
    score_rows(num_rows, queries, dim / 2, work->blocks, work->num_blocks, begin, end, scores);
    for (int r = 0; r < num_rows; r++) {
        float top, sum;
        softmax_row(rows + r, scores + r * MAX_SPLIT, weights + r * MAX_SPLIT, begin, end, softcap, &top, &sum);
        factors[r] = 1.0f;
        if (rows[r].top_sum) {
            rows[r].top_sum[0] = top;
            rows[r].top_sum[1] = sum;
        } else {
            factors[r] = 1.0f / sum;
        }
    }
    weigh_rows(num_rows, weights, work->blocks + work->num_blocks, work->num_blocks, begin, end, dim, rows, factors);
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

static int begin_attending(int dim)
{
    (void)dim;
    return ROWS;
}

static void attend(int num_rows, const struct row *rows, struct work *work, int dim, float softcap)
{
    static attend_rows_of *const by_rows[] = {NULL, attend_1, attend_2, attend_3, attend_4, attend_5, attend_6};
    by_rows[num_rows](rows, work, dim, softcap);
}

static void end_attending(int at_a_time)
{
    (void)at_a_time;
}

const struct format batchinfer_bf16_format = {
    clear_block, write_head, fetch_slot, prepare_query, begin_attending, attend, end_attending};
