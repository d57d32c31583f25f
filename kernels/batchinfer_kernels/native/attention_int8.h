/* What a row block of int8's attention is, however its products are made: its scores and their softmax. */

#ifndef BATCHINFER_ATTENTION_INT8_H
#define BATCHINFER_ATTENTION_INT8_H

#include "kv_format.h"
#include "tiles.h"

enum { MOST = 127, MOST_WEIGHT = 255 };
static const float LEAST = 1e-30f;
static const float ROUNDS = 12582912.0f; /* 1.5 * 2^23: added to a number it leaves a whole one in the lowest bits */

/* Rows that are worked on together: the blocks that any of them sees, and by row what its codes are to be multiplied
 * by to give scores, and weights, what keys that are 128 too high add to its products with them, and its highest score
 * and the sum of its weights. */
struct row_block {
    int begin, end;
    float scales[MOST_ROWS], factors[MOST_ROWS], tops[MOST_ROWS], sums[MOST_ROWS];
    int32_t excess[MOST_ROWS];
};

INLINE const float *scales_of(const char *codes, int dim)
{
    return (const float *)(codes + (size_t)dim * LANES);
}

/* Queries' codes go to `queries`, a row each `stride` bytes. */
INLINE void load_rows(const int num_rows, const struct row *rows, int dim, int8_t *queries, int stride,
                      struct row_block *block)
{
    block->begin = MAX_BLOCKS;
    block->end = 0;
    for (int r = 0; r < num_rows; r++) {
        const int first = rows[r].first / LANES, last = rows[r].last / LANES + 1;
        block->begin = first < block->begin ? first : block->begin;
        block->end = last > block->end ? last : block->end;
        memcpy(queries + r * stride, rows[r].query, dim);
        memcpy(block->scales + r, rows[r].query + dim, sizeof(float));
        memcpy(block->excess + r, rows[r].query + dim + sizeof(float), sizeof(int32_t));
    }
}

/* 2^x within 2^-18 of it for x up to 1, exactly 0 from -127 down; NaN for NaN. */
INLINE __m512 weight_of(__m512 x)
{
    const __m512 shift = _mm512_set1_ps(ROUNDS);
    x = _mm512_max_ps(_mm512_set1_ps(-127.0f), x);    /* of an unordered pair, max gives the second */
    const __m512 whole = _mm512_add_ps(x, shift);
    const __m512 part = _mm512_sub_ps(x, _mm512_sub_ps(whole, shift));
    /* Its largest relative error is as small as that of any such polynomial can be. */
    __m512 sum = _mm512_set1_ps(9.58269089e-3f);
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(5.59061170e-2f));
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(2.40240991e-1f));
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(6.93124235e-1f));
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(1.0f));
    return (__m512)_mm512_add_epi32((__m512i)sum, _mm512_slli_epi32((__m512i)whole, 23));
}

/* A block's scores, from sums of products with its keys; in units of the row's scale, or, under a softcap, what they
 * are. */
INLINE __m512 score_of(const float *sums, __m512i excess, const char *keys, int dim, __m512 scale, float softcap)
{
    const __m512i whole = _mm512_sub_epi32(_mm512_load_si512(sums), excess);
    const __m512 score = _mm512_mul_ps(_mm512_cvtepi32_ps(whole), _mm512_loadu_ps(scales_of(keys, dim)));
    if (softcap == 0.0f)
        return score;
    return _mm512_mul_ps(tanh_of(_mm512_mul_ps(score, scale)), _mm512_set1_ps(softcap));
}

/* A row's sums become scores, -infinity where it sees nothing, which is in its first and last block only; the
 * highest. */
INLINE __m512 finish_scores(const struct row *row, float *sums, __m512i excess, const char *const *keys, int dim,
                            float scale, float softcap)
{
    const int first = row->first / LANES, last = row->last / LANES;
    const __m512 nothing = _mm512_set1_ps(-INFINITY), factor = _mm512_set1_ps(scale);
    __m512 score = score_of(sums + first * LANES, excess, keys[first], dim, factor, softcap);
    score = _mm512_mask_mov_ps(nothing, seen_lanes(row, first * LANES), score);
    _mm512_store_ps(sums + first * LANES, score);
    if (first == last)
        return score;
    __m512 highest = score, second = nothing;
    int b = first + 1;
    for (; b + 1 < last; b += 2) {
        score = score_of(sums + b * LANES, excess, keys[b], dim, factor, softcap);
        _mm512_store_ps(sums + b * LANES, score);
        second = _mm512_max_ps(second, score);
        score = score_of(sums + (b + 1) * LANES, excess, keys[b + 1], dim, factor, softcap);
        _mm512_store_ps(sums + (b + 1) * LANES, score);
        highest = _mm512_max_ps(highest, score);
    }
    if (b < last) {
        score = score_of(sums + b * LANES, excess, keys[b], dim, factor, softcap);
        _mm512_store_ps(sums + b * LANES, score);
        second = _mm512_max_ps(second, score);
    }
    score = score_of(sums + last * LANES, excess, keys[last], dim, factor, softcap);
    score = _mm512_mask_mov_ps(nothing, seen_lanes(row, last * LANES), score);
    _mm512_store_ps(sums + last * LANES, score);
    return _mm512_max_ps(_mm512_max_ps(highest, second), score);
}

/* The unit that multiplies tiles falls asleep after some 1,500 cycles without work, and takes 800 to wake up: it is
 * given some to no end. `idle`: cycles since it had any, or near enough. */
INLINE void stay_awake(int *idle, int cycles)
{
#ifdef __AMX_INT8__
    *idle += cycles;
    if (*idle > 1000) {
        *idle = 0;
        _tile_dpbusd(7, 4, 5);
    }
#endif
}

/* Sums of products with keys, float32's bits [rows][stride], become weights with their values' scale in them, over the
 * blocks that a row sees; `factors` are the highest of them. Each pass is over all rows, so that none waits for the end
 * of another. `tiled`, a constant: between products of tiles. Then values are fetched into the first level as well. */
INLINE void softmax_rows(const int tiled, const int num_rows, const struct row *rows, struct row_block *block,
                         float *scores, int stride, const struct work *work, int dim, float softcap)
{
    const char *const *keys = work->blocks, *const *values = keys + work->num_blocks;
    int idle = 0;
    for (int r = 0; r < num_rows; r++) {
        const int first = rows[r].first / LANES, last = rows[r].last / LANES;
        const __m512 highest = finish_scores(rows + r, scores + r * stride, _mm512_set1_epi32(block->excess[r]), keys,
                                             dim, block->scales[r], softcap);
        if (softcap != 0.0f)
            block->scales[r] = 1.0f;
        /* The bound only matters for a row that sees nothing but scores of -infinity, or one that is NaN. */
        const float top = _mm512_reduce_max_ps(highest) * block->scales[r];
        block->tops[r] = top > -1e30f ? top : -1e30f;
        /* Only the top is rounded where the other product is fused, and a score may be above it: too far if so large. */
        if (fabsf(block->tops[r]) > 0x1p23f) {
            for (int b = first; b <= last; b++) {
                float *score = scores + r * stride + b * LANES;
                _mm512_store_ps(score, _mm512_mul_ps(_mm512_load_ps(score), _mm512_set1_ps(block->scales[r])));
            }
            block->scales[r] = 1.0f;
        }
        if (tiled)
            stay_awake(&idle, (last - first + 1) * (softcap != 0.0f ? 30 : 4));
    }
    for (int r = 0; r < num_rows; r++) {
        const int first = rows[r].first / LANES, last = rows[r].last / LANES;
        const __m512 scale = _mm512_set1_ps(block->scales[r]), top = _mm512_set1_ps(block->tops[r]);
        __m512 total = _mm512_setzero_ps(), most = total;
        for (int b = first; b <= last; b++) {
            float *score = scores + r * stride + b * LANES;
            const __m512 weight = weight_of(_mm512_fmsub_ps(_mm512_load_ps(score), scale, top));
            const __m512 scaled = _mm512_mul_ps(weight, _mm512_loadu_ps(scales_of(values[b], dim)));
            if (tiled)
                for (int i = r; i < dim / 4; i += num_rows)
                    _mm_prefetch(values[b] + i * REGISTER, _MM_HINT_T0);
            total = _mm512_add_ps(total, weight);
            most = _mm512_max_ps(most, scaled);
            _mm512_store_ps(score, scaled);
        }
        block->sums[r] = _mm512_reduce_add_ps(total);
        block->factors[r] = _mm512_reduce_max_ps(most);
        if (tiled)
            stay_awake(&idle, (last - first + 1) * 8);
    }
}

/* What the largest of a row's weights is to be multiplied by to be its largest code; *factor, that weight, becomes what
 * undoes it. */
INLINE float code_weights(float *factor)
{
    const float most = *factor;
    *factor = most / MOST_WEIGHT;
    return most < LEAST ? 0.0f : MOST_WEIGHT / most;
}

/* What is left to be done with weighted values, a factor by row; sums go where partial results do. */
INLINE void finish_rows(const int num_rows, const struct row *rows, struct row_block *block)
{
    for (int r = 0; r < num_rows; r++) {
        if (rows[r].top_sum) {
            rows[r].top_sum[0] = block->tops[r];
            rows[r].top_sum[1] = block->sums[r];
        } else {
            block->factors[r] /= block->sums[r];
        }
    }
}

#ifdef __AMX_INT8__
/* Attention of up to MOST_ROWS rows with its products in tiles, for heads that are whole tiles wide; between
 * `begin_tiles` and `end_tiles`. */
void batchinfer_attend_int8_tiles(int num_rows, const struct row *rows, const struct work *work, int dim,
                                  float softcap);
#endif

#endif
