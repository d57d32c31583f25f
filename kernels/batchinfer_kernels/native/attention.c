/* Attention over a KV cache in bfloat16, packed for 512-bit registers; attention.py says how it is called.
 *
 * A tile is a list of queries and one split of the KV that they attend to. Its rows (a query and one of the heads that
 * share a KV head) are worked on ROWS at a time: scores, softmax and values of these stay in the first-level cache.
 * Scores are in units of log 2, so that weights are powers of two.
 *
 * What a row gives for a split depends on nothing else: each score and each output is one chain of additions in the
 * order of the dimensions or tokens, whatever the number of rows beside it; a token that the row does not see has a
 * weight of exactly zero, and its value is finite (see write_values), so that it adds nothing.
 */

#include <math.h>
#include <omp.h>
#include <stddef.h>
#include <string.h>

#include "attention.h"
#include "bf16.h"

enum { LANES = 16, ROWS = 6, MAX_SPLIT = 1024, MAX_HEAD_DIM = 256, MAX_BLOCKS = MAX_SPLIT / LANES };

/* A work item: a tile and KV head, and the blocks of the split that its queries see, the first at position `origin` of
 * the sequence: their keys, then their values, then the keys that the thread works on next. While blocks[i] is worked
 * on, blocks[i + num_blocks] is fetched from memory: waiting for it took longer than computing. */
struct work {
    int64_t tile, kv_head, split, origin;
    int num_blocks;
    const uint16_t *blocks[3 * MAX_BLOCKS];
};

/* A query and head: where its results go, and what it sees: tokens first .. last, counted from the work's origin. */
struct row {
    const float *query;
    float *out, *top_sum; /* top_sum: NULL where out is the final result */
    int first, last;
};

/* ---- Writing ---- */

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
static void write_head(const float *key, const float *value, uint16_t *keys, uint16_t *values, int dim, int offset)
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
    uint16_t *pair_row = values + (size_t)(offset / 2) * dim * 2;
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

/* ---- A row block of a tile ---- */

/* Rounded queries, [ROWS][MAX_HEAD_DIM]. */
INLINE void load_queries(const struct row *rows, int num_rows, int dim, float scale, uint16_t *queries)
{
    for (int r = 0; r < num_rows; r++)
        for (int i = 0; i < dim; i += 32)
            _mm512_store_si512(queries + r * MAX_HEAD_DIM + i,
                               load_bf16(rows[r].query, i, dim, _mm512_set1_ps(scale)));
}

/* Scores of `num_rows` rows and `num_blocks` blocks of keys, both constants. keys[b + ahead] is fetched. */
INLINE void score_blocks(const int num_rows, const int num_blocks, const uint16_t *queries, int pairs,
                         const uint16_t *const *keys, int ahead, float *scores)
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
            key[b] = _mm512_loadu_si512(keys[b] + p * 2 * LANES);
            _mm_prefetch(keys[b + ahead] + p * 2 * LANES, _MM_HINT_T1);
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

INLINE void score_rows(const int num_rows, const uint16_t *queries, int pairs, const uint16_t *const *keys, int ahead,
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
        const int hidden = row->first - b * LANES, seen = row->last - b * LANES + 1;
        if (hidden > 0 || seen < LANES) {
            const unsigned low = hidden <= 0 ? 0u : hidden >= LANES ? 0xFFFFu : (1u << hidden) - 1;
            const unsigned high = seen >= LANES ? 0xFFFFu : seen <= 0 ? 0u : (1u << seen) - 1;
            score = _mm512_mask_mov_ps(nothing, (__mmask16)(high & ~low), score);
        }
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
INLINE void weigh_part(const int num_rows, const int num_parts, const uint16_t *weights, const uint16_t *const *values,
                       int ahead, int begin, int end, int dim, int from, const struct row *rows, const float *factors)
{
    __m512 sum[ROWS][4];
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 8
        for (int i = 0; i < num_parts; i++)
            sum[r][i] = _mm512_setzero_ps();
    for (int b = begin; b < end; b++) {
        const uint16_t *block = values[b] + 2 * from, *fetched = values[b + ahead] + 2 * from;
        for (int p = 0; p < LANES / 2; p++) {
            __m512i value[4];
#pragma GCC unroll 8
            for (int i = 0; i < num_parts; i++) {
                value[i] = _mm512_loadu_si512(block + (size_t)p * 2 * dim + i * 2 * LANES);
                _mm_prefetch(fetched + (size_t)p * 2 * dim + i * 2 * LANES, _MM_HINT_T1);
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

INLINE void weigh_rows(const int num_rows, const uint16_t *weights, const uint16_t *const *values, int ahead, int begin,
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

INLINE void attend_rows(const int num_rows, const struct row *rows, const struct work *work, int dim, float scale,
                        float softcap)
{
    uint16_t queries[ROWS * MAX_HEAD_DIM] __attribute__((aligned(64)));
    float scores[ROWS * MAX_SPLIT] __attribute__((aligned(64)));
    uint16_t weights[ROWS * MAX_SPLIT] __attribute__((aligned(64)));
    float factors[ROWS];
    int begin = MAX_BLOCKS, end = 0;
    for (int r = 0; r < num_rows; r++) {
        const int first = rows[r].first / LANES, last = rows[r].last / LANES + 1;
        begin = first < begin ? first : begin;
        end = last > end ? last : end;
    }
    load_queries(rows, num_rows, dim, scale, queries);
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

/* Each number of rows has code of its own, with its sums in registers. */
#define ATTEND(n)                                                                                                     \
    static __attribute__((noinline)) void attend_##n(const struct row *rows, const struct work *work, int dim,        \
                                                     float scale, float softcap)                                      \
    {                                                                                                                 \
        attend_rows(n, rows, work, dim, scale, softcap);                                                              \
    }
ATTEND(1)
ATTEND(2)
ATTEND(3)
ATTEND(4)
ATTEND(5)
ATTEND(6)

static void (*const attend_some[])(const struct row *, const struct work *, int, float,
                                   float) = {NULL, attend_1, attend_2, attend_3, attend_4, attend_5, attend_6};

/* ---- Tiles and the merge ---- */

static int64_t first_seen(const struct step *step, int64_t position)
{
    const int64_t first = step->window ? position - step->window + 1 : 0;
    return first > 0 ? first : 0;
}

/* Finds an item's blocks. */
static void prepare(const struct step *step, const struct layer *layer, int64_t item, struct work *work)
{
    const int64_t tile = item / step->num_kv_heads, kv_head = item % step->num_kv_heads;
    const int64_t split = step->tile_split[tile], begin = split * step->split_size, end = begin + step->split_size;
    const int64_t *members = step->members + step->tile_start[tile];
    const int64_t *table = step->block_tables + step->tile_chunk[tile] * step->table_width;
    int64_t lowest = end - 1, highest = begin;
    for (int64_t i = 0; i < step->tile_count[tile]; i++) {
        const int64_t position = step->positions[members[i]], first = first_seen(step, position);
        lowest = first < lowest ? first : lowest;
        highest = position > highest ? position : highest;
    }
    lowest = (lowest > begin ? lowest : begin) / LANES;
    highest = (highest < end ? highest : end - 1) / LANES;
    const int count = (int)(highest - lowest + 1);
    work->tile = tile;
    work->kv_head = kv_head;
    work->split = split;
    work->origin = lowest * LANES;
    work->num_blocks = count;
    for (int b = 0; b < count; b++) {
        const int64_t at = table[lowest + b] * layer->block_stride + kv_head * layer->head_stride;
        work->blocks[b] = layer->k_cache + at;
        work->blocks[count + b] = layer->v_cache + at;
    }
}

static void attend_work(const struct step *step, const struct layer *layer, const struct work *work)
{
    const int64_t heads = step->num_heads, group = heads / step->num_kv_heads, dim = step->head_dim;
    const int64_t *members = step->members + step->tile_start[work->tile], count = step->tile_count[work->tile];
    const int64_t begin = work->split * step->split_size, end = begin + step->split_size;
    struct row rows[ROWS];
    int filled = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t token = members[i], position = step->positions[token], first = first_seen(step, position);
        if (position < begin || first >= end)
            continue; /* sees nothing of this split, while others of its tile do */
        const int64_t entry = step->entry[token];
        for (int64_t g = 0; g < group; g++) {
            const int64_t head = work->kv_head * group + g;
            struct row *row = rows + filled++;
            row->query = layer->q + token * layer->q_stride + head * dim;
            row->first = (int)((first > work->origin ? first : work->origin) - work->origin);
            row->last = (int)((position < end ? position : end - 1) - work->origin);
            if (entry < 0) {
                row->out = layer->out + (token * heads + head) * dim;
                row->top_sum = NULL;
            } else {
                const int64_t at = (entry + work->split - first / step->split_size) * heads + head;
                row->out = layer->part + at * dim;
                row->top_sum = layer->part_top_sum + at * 2;
            }
            if (filled == ROWS) {
                attend_some[ROWS](rows, work, (int)dim, layer->scale, layer->softcap);
                filled = 0;
            }
        }
    }
    if (filled)
        attend_some[filled](rows, work, (int)dim, layer->scale, layer->softcap);
}

/* Items `first`, then others from `queue` on, until there are none. The next one is known before one is begun, so that
 * its keys can be fetched. */
static void attend_items(const struct step *step, const struct layer *layer, int64_t first, int64_t *queue)
{
    struct work works[2], *now = works, *next = works + 1;
    if (first >= step->num_items)
        return;
    prepare(step, layer, step->items[first], now);
    for (;;) {
        int64_t item;
#pragma omp atomic capture
        item = (*queue)++;
        const int more = item < step->num_items;
        if (more)
            prepare(step, layer, step->items[item], next);
        const struct work *then = more ? next : now;
        for (int i = 0; i < now->num_blocks; i++)
            now->blocks[2 * now->num_blocks + i] = then->blocks[i < then->num_blocks ? i : 0];
        attend_work(step, layer, now);
        if (!more)
            return;
        struct work *done = now;
        now = next;
        next = done;
    }
}

void batchinfer_merge_token(const struct step *step, const struct layer *layer, int64_t token)
{
    const int64_t position = step->positions[token], heads = step->num_heads, dim = step->head_dim;
    const int64_t splits = position / step->split_size - first_seen(step, position) / step->split_size + 1;
    for (int64_t head = 0; head < heads; head++) {
        const int64_t at = step->entry[token] * heads + head;
        float top = -INFINITY, sum = 0.0f;
        for (int64_t s = 0; s < splits; s++)
            top = fmaxf(top, layer->part_top_sum[2 * (at + s * heads)]);
        __m512 total[MAX_HEAD_DIM / LANES];
        for (int64_t i = 0; i < dim / LANES; i++)
            total[i] = _mm512_setzero_ps();
        for (int64_t s = 0; s < splits; s++) {
            const float *top_sum = layer->part_top_sum + 2 * (at + s * heads);
            const __m512 weight = exp2_of(_mm512_set1_ps(top_sum[0] - top));
            const float *part = layer->part + (at + s * heads) * dim;
            sum += _mm512_cvtss_f32(weight) * top_sum[1];
            for (int64_t i = 0; i < dim / LANES; i++)
                total[i] = _mm512_fmadd_ps(weight, _mm512_loadu_ps(part + i * LANES), total[i]);
        }
        const __m512 factor = _mm512_set1_ps(1.0f / sum);
        for (int64_t i = 0; i < dim / LANES; i++)
            _mm512_storeu_ps(layer->out + (token * heads + head) * dim + i * LANES, _mm512_mul_ps(total[i], factor));
    }
}

void batchinfer_clear_values(const struct step *step, const struct layer *layer)
{
    const int64_t kv_heads = step->num_kv_heads, dim = step->head_dim;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < step->num_fresh * kv_heads; i++)
        memset(layer->v_cache + step->fresh_blocks[i / kv_heads] * layer->block_stride +
                   i % kv_heads * layer->head_stride,
               0, dim * LANES * sizeof(uint16_t));
}

void batchinfer_store_token(const struct step *step, const struct layer *layer, int64_t token)
{
    const int64_t dim = step->head_dim;
    for (int64_t h = 0; h < step->num_kv_heads; h++) {
        const int64_t at = step->slots[token] / LANES * layer->block_stride + h * layer->head_stride;
        write_head(layer->k + token * layer->k_stride + h * dim, layer->v + token * layer->v_stride + h * dim,
                   layer->k_cache + at, layer->v_cache + at, (int)dim, (int)(step->slots[token] % LANES));
    }
}

void batchinfer_attend_tiles(const struct step *step, const struct layer *layer, int64_t *queue)
{
#pragma omp single
    *queue = omp_get_num_threads();
    attend_items(step, layer, omp_get_thread_num(), queue);
#pragma omp barrier
}

void batchinfer_attention(const struct step *step, const struct layer *layer, int threads)
{
    int64_t queue;
#pragma omp parallel num_threads(threads)
    {
        batchinfer_clear_values(step, layer);
#pragma omp for schedule(static) nowait
        for (int64_t t = 0; t < step->num_tokens; t++)
            batchinfer_store_token(step, layer, t);
        batchinfer_attend_tiles(step, layer, &queue);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < step->num_several; i++)
            batchinfer_merge_token(step, layer, step->several[i]);
    }
}
