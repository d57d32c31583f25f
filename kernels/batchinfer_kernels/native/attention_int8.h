/* What a row block of int8's attention is, however its products are made: its scores and their softmax. */

#ifndef BATCHINFER_ATTENTION_INT8_H
#define BATCHINFER_ATTENTION_INT8_H

#include "kv_format.h"
#include "tiles.h"

/* JOINED: blocks whose codes of weights fill a register. */
enum { MOST = 127, MOST_WEIGHT = 255, JOINED = TILE_BYTES / LANES };
static const float LEAST = 1e-30f;

/* Rows that are worked on together: the blocks that any of them sees, those that all of them see whole, and by row what
 * its codes are to be multiplied by to give scores, what its sums of products begin with since keys are 128 too high,
 * its highest exponent, the sum of its weights, and what its sums of weighted values are to be multiplied by. */
struct row_block {
    int begin, end, seen_begin, seen_end;
    float scales[MOST_ROWS], tops[MOST_ROWS], sums[MOST_ROWS], factors[MOST_ROWS];
    int32_t starts[MOST_ROWS];
};

INLINE const float *scales_of(const char *codes, int dim)
{
    return (const float *)(codes + (size_t)dim * LANES);
}

/* Queries' codes go to `queries`, a row each `stride` bytes. */
INLINE void load_rows(const int num_rows, const struct row *rows, int dim, int8_t *queries, int stride,
                      struct row_block *block)
{
    block->begin = block->seen_end = MAX_BLOCKS;
    block->end = block->seen_begin = 0;
    for (int r = 0; r < num_rows; r++) {
        const int first = rows[r].first / LANES, first_whole = (rows[r].first + LANES - 1) / LANES;
        const int end = rows[r].last / LANES + 1, end_whole = (rows[r].last + 1) / LANES;
        block->begin = first < block->begin ? first : block->begin;
        block->seen_begin = first_whole > block->seen_begin ? first_whole : block->seen_begin;
        block->end = end > block->end ? end : block->end;
        block->seen_end = end_whole < block->seen_end ? end_whole : block->seen_end;
        for (int i = 0; i < dim; i += LANES) /* (a call of memcpy took longer) */
            _mm_store_si128((__m128i *)(queries + r * stride + i), _mm_loadu_si128((const __m128i *)(rows[r].query + i)));
        memcpy(block->scales + r, rows[r].query + dim, sizeof(float));
        memcpy(block->starts + r, rows[r].query + dim + sizeof(float), sizeof(int32_t));
    }
}

/* `unit` * 2^x within 2^-18 of it; NaN for NaN. The largest relative error is as small as that of any such polynomial
 * can be. */
INLINE __m512 power_of(__m512 x, const float unit)
{
    const __m512 part = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); /* 0 .. 1 */
    __m512 sum = _mm512_set1_ps(1.35347405e-2f * unit);
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(5.20103052e-2f * unit));
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(2.41443470e-1f * unit));
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(6.93003714e-1f * unit));
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(1.00000262f * unit));
    return _mm512_scalef_ps(sum, x);
}

/* Exponents of a block's weights with their values' scale in them, from sums of products with its keys. */
INLINE __m512 exponents_of(const float *sums, __m512 key_scales, __m512 minus_scales, __m512 scale, float softcap)
{
    const __m512 scores = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_load_si512(sums)), key_scales);
    if (softcap == 0.0f)
        return _mm512_fmsub_ps(scores, scale, minus_scales);
    return _mm512_fmsub_ps(tanh_of(_mm512_mul_ps(scores, scale)), _mm512_set1_ps(softcap), minus_scales);
}

#define HALVES(first, second) (is_top ? _mm512_max_ps(first, second) : _mm512_add_ps(first, second))

/* The highest of each row's 16 numbers where `is_top`, a constant, or their sum, halves added to halves: of 16 rows
 * side by side the same operands in the same order. */
INLINE void reduce_rows(const int num_rows, const int is_top, const __m512 *rows, float *reduced)
{
    if (num_rows < MOST_ROWS) {
        for (int r = 0; r < num_rows; r++)
            reduced[r] = is_top ? _mm512_reduce_max_ps(rows[r]) : _mm512_reduce_add_ps(rows[r]);
        return;
    }
    __m512 x[MOST_ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < 8; r++)
        x[r] = HALVES(_mm512_shuffle_f32x4(rows[r], rows[r + 8], 0x44),
                      _mm512_shuffle_f32x4(rows[r], rows[r + 8], 0xEE));
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++)
        x[r] = HALVES(_mm512_shuffle_f32x4(x[r], x[r + 4], 0x88), _mm512_shuffle_f32x4(x[r], x[r + 4], 0xDD));
    /* Lanes of 128 bits are of rows r, r + 8, r + 4 and r + 12; then their halves of a row each. */
#pragma GCC unroll 2
    for (int r = 0; r < 2; r++)
        x[r] = HALVES((__m512)_mm512_unpacklo_pd((__m512d)x[r], (__m512d)x[r + 2]),
                      (__m512)_mm512_unpackhi_pd((__m512d)x[r], (__m512d)x[r + 2]));
    x[0] = HALVES(_mm512_shuffle_ps(x[0], x[1], 0x88), _mm512_shuffle_ps(x[0], x[1], 0xDD));
    const __m512i order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
    _mm512_storeu_ps(reduced, _mm512_permutexvar_ps(order, x[0]));
}

/* Four blocks' exponents become weights, and these codes [tokens / 4 of a block][block][4]. A weight is multiplied by
 * what undoes its value's scale before it is added to *total, block by block. */
INLINE __m512i weigh_four(const float *exponents, __m512 top, const float *inverse, __m512 *total)
{
    __m512i codes[JOINED];
    __m512 sum = *total;
#pragma GCC unroll 4
    for (int b = 0; b < JOINED; b++) {
        const __m512 weight = power_of(_mm512_sub_ps(_mm512_load_ps(exponents + b * LANES), top), MOST_WEIGHT);
        sum = _mm512_fmadd_ps(weight, _mm512_load_ps(inverse + b * LANES), sum);
        codes[b] = _mm512_cvtps_epi32(weight);
    }
    *total = sum;
    return _mm512_packus_epi16(_mm512_packs_epi32(codes[0], codes[1]), _mm512_packs_epi32(codes[2], codes[3]));
}

/* Block b's sums of products with keys, at sums [rows][stride], become exponents, and the highest of each row so far is
 * found. Constant: `room`, for how many rows there is memory, num_rows at least. */
INLINE void exponents_of_block(const int room, const int num_rows, const struct row *rows,
                               const struct row_block *block, int b, float *sums, int stride, __m512 *highest,
                               const struct work *work, int dim, float softcap)
{
    const __m512 key_scales = _mm512_loadu_ps(scales_of(work->blocks[b], dim));
    const __m512 minus_scales = _mm512_loadu_ps(scales_of(work->blocks[work->num_blocks + b], dim));
    if (softcap == 0.0f && b >= block->seen_begin && b < block->seen_end) {
#pragma GCC unroll 16
        for (int r = 0; r < room; r++) {
            const __m512 e = exponents_of(sums + r * stride, key_scales, minus_scales,
                                          _mm512_set1_ps(block->scales[r]), 0.0f);
            _mm512_store_ps(sums + r * stride, e);
            highest[r] = _mm512_max_ps(highest[r], e);
        }
    } else {
        for (int r = 0; r < num_rows; r++) {
            __m512 e = exponents_of(sums + r * stride, key_scales, minus_scales, _mm512_set1_ps(block->scales[r]),
                                    softcap);
            e = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen_lanes(rows + r, b * LANES), e);
            _mm512_store_ps(sums + r * stride, e);
            highest[r] = _mm512_max_ps(highest[r], e);
        }
    }
}

/* Blocks that are not there, behind the last one, weigh nothing. */
INLINE void hide_behind(int num_rows, int num_blocks, float *sums, int stride)
{
    for (int b = num_blocks; b % JOINED; b++)
        for (int r = 0; r < num_rows; r++)
            _mm512_store_ps(sums + r * stride + b * LANES, _mm512_set1_ps(-INFINITY));
}

INLINE void find_tops(const int room, const __m512 *highest, struct row_block *block)
{
    reduce_rows(room, 1, highest, block->tops);
    /* The bound only matters for a row that sees nothing but scores of -infinity, or one that is NaN. */
    const __mmask16 mine = (__mmask16)((1 << room) - 1);
    const __m512 tops = _mm512_maskz_loadu_ps(mine, block->tops);
    _mm512_mask_storeu_ps(block->tops, mine, _mm512_max_ps(tops, _mm512_set1_ps(-1e30f)));
}

/* What is left to be done with weighted values, a factor by row; sums go where partial results do. All weights are
 * MOST_WEIGHT times what they are, in both. */
INLINE void finish_rows(const int num_rows, const struct row *rows, struct row_block *block)
{
    for (int r = 0; r < num_rows; r++) {
        block->factors[r] = 1.0f;
        if (rows[r].top_sum) {
            rows[r].top_sum[0] = block->tops[r];
            rows[r].top_sum[1] = block->sums[r];
        } else {
            block->factors[r] /= block->sums[r];
        }
    }
}

#ifdef __AMX_INT8__
/* Attention of any number of rows with its products in tiles, for heads that are whole tiles wide; between
 * `begin_tiles` and `end_tiles`. */
void batchinfer_attend_int8_tiles(int num_rows, const struct row *rows, struct work *work, int dim, float softcap);
#endif

#endif
