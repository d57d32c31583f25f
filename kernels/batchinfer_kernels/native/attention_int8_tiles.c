/* Attention's cache in int8 on processors with AMX: a row block's products in tiles, 16 rows at a time.
 *
 * 64 dimensions of a block's keys are a tile as they lie. Of values a tile would be 16 tokens deep, a quarter of what
 * the same time could multiply: rows of four blocks are gathered into one first. All of it lies in the memory of the
 * scores, which are dead by then: what is written here must be in the first-level cache, which is no larger than a
 * split's scores, keys and values.
 */

#include "attention_int8.h"

#ifdef __AMX_INT8__
enum { JOINED = TILE_BYTES / LANES, GATHERED = JOINED * TILE_BYTES, MOST_STRIDE = (MAX_SPLIT + 9 * LANES) * 4 };

/* Tiles 0 to 3 are sums, 4 and 5 keys or values, 6 queries or weights, 7 of no meaning.
 *
 * To two columns of 16 scores: products of queries [TILE_ROWS][dim] and two blocks of keys. */
#define SCORE_PAIR(a, b)                               \
    _tile_zero(a);                                     \
    _tile_zero(b);                                     \
    for (int i = 0; i < dim; i += TILE_BYTES) {        \
        _tile_loadd(6, queries + i, dim);              \
        _tile_loadd(4, first + i * LANES, TILE_BYTES); \
        _tile_dpbsud(a, 6, 4);                         \
        _tile_loadd(5, second + i * LANES, TILE_BYTES); \
        _tile_dpbsud(b, 6, 5);                         \
    }
#define STORE_PAIR(a, b, to)       \
    _tile_stored(a, to, stride);   \
    _tile_stored(b, to + REGISTER, stride);

/* Products with keys of blocks begin .. end, in rows of `stride` bytes; one column more where these are an odd number.
 * A pair of sums is stored while the next is made. */
INLINE void score_rows(const int8_t *queries, int dim, const char *const *keys, int begin, int end, char *scores,
                       long stride)
{
    for (int b = begin; b < end; b += 2, scores += 2 * REGISTER) {
        const char *first = keys[b], *second = keys[b + 1 < end ? b + 1 : b];
        if ((b - begin) & 2) {
            SCORE_PAIR(2, 3)
            STORE_PAIR(0, 1, scores - 2 * REGISTER)
        } else {
            SCORE_PAIR(0, 1)
            if (b > begin) {
                STORE_PAIR(2, 3, scores - 2 * REGISTER)
            }
        }
    }
    if ((end - begin - 1) & 2) {
        STORE_PAIR(2, 3, scores - 2 * REGISTER)
    } else {
        STORE_PAIR(0, 1, scores - 2 * REGISTER)
    }
}

/* Four blocks' weights as codes, 0 in blocks that are not from first to last: [tokens / 4 of a block][block][4]. */
INLINE __m512i codes_of_four(const float *scores, __m512 factor, int first, int last)
{
    const __m512 rounds = _mm512_set1_ps(ROUNDS);
    __m512i whole[JOINED];
    if (first <= 0 && last >= JOINED - 1)
#pragma GCC unroll 4
        for (int b = 0; b < JOINED; b++)
            whole[b] = (__m512i)_mm512_fmadd_ps(_mm512_load_ps(scores + b * LANES), factor, rounds);
    else
#pragma GCC unroll 4
        for (int b = 0; b < JOINED; b++) { /* whatever is there: it may be no number, and slow */
            const __m512 own = _mm512_maskz_load_ps(b < first || b > last ? 0 : 0xFFFF, scores + b * LANES);
            whole[b] = (__m512i)_mm512_fmadd_ps(own, factor, rounds);
        }
#pragma GCC unroll 4
    for (int b = 0; b < JOINED; b++)
        whole[b] = _mm512_and_si512(whole[b], _mm512_set1_epi32(MOST_WEIGHT));
    const __m512i low = _mm512_packus_epi32(whole[0], whole[1]), high = _mm512_packus_epi32(whole[2], whole[3]);
    return _mm512_packus_epi16(low, high);
}

/* Weights become codes, at the start of their row. */
INLINE void round_weights(int num_rows, const struct row *rows, struct row_block *block, char *scores, long stride,
                          int dim)
{
    for (int r = 0; r < num_rows; r++, scores += stride) {
        const __m512 factor = _mm512_set1_ps(code_weights(block->factors + r));
        const int first = rows[r].first / LANES, last = rows[r].last / LANES;
        char *codes = scores;
        fetch_results(rows + r, dim);
        for (int b = block->begin; b < block->end; b += JOINED, codes += TILE_BYTES) {
            const float *four = (const float *)(scores + (b - block->begin) * REGISTER);
            _mm512_store_si512(codes, codes_of_four(four, factor, first - b, last - b));
        }
    }
}

/* Values of blocks begin .. begin + 3, if before `end`, in 64 dimensions: four tiles side by side, in the order of
 * `codes_of_four`. Of blocks that are not there anything may be multiplied by a weight of 0. */
INLINE void gather_values(const char *const *values, int begin, int end, int dim, int from, char *to, long stride)
{
    for (int b = begin; b < end && b < begin + JOINED; b++, to += stride)
#pragma GCC unroll 4
        for (int t = 0; t < LANES / 4; t++)
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++)
                _mm512_store_si512(to + t * JOINED * stride + i * TILE_BYTES,
                                   _mm512_loadu_si512(values[b] + ((size_t)t * dim + from + i * LANES) * 4));
    WRITTEN();
}

/* Weighted values. Four blocks are gathered while the four before are multiplied. */
INLINE void weigh_rows(int num_rows, const struct row *rows, const struct row_block *block, char *scores, long stride,
                       const char *const *values, int dim)
{
    const int begin = block->begin, end = block->end;
    char *gathered = scores + (end - begin + JOINED - 1) / JOINED * TILE_BYTES;
    for (int from = 0; from < dim; from += 4 * LANES) {
        const char *codes = scores;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        gather_values(values, begin, end, dim, from, gathered, stride);
        for (int b = begin, at = 0; b < end; b += JOINED, at ^= GATHERED, codes += TILE_BYTES) {
            gather_values(values, b + JOINED, end, dim, from, gathered + (at ^ GATHERED), stride);
            _tile_loadd(6, codes, stride);
            _tile_loadd(4, gathered + at, stride);
            _tile_dpbusd(0, 6, 4);
            _tile_loadd(5, gathered + at + TILE_BYTES, stride);
            _tile_dpbusd(1, 6, 5);
            _tile_loadd(4, gathered + at + 2 * TILE_BYTES, stride);
            _tile_dpbusd(2, 6, 4);
            _tile_loadd(5, gathered + at + 3 * TILE_BYTES, stride);
            _tile_dpbusd(3, 6, 5);
            WRITTEN(); /* what comes next goes where these tiles were loaded from */
        }
        STORE_PAIR(0, 1, gathered)
        STORE_PAIR(2, 3, gathered + 2 * REGISTER)
        for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                const __m512i sum = _mm512_load_si512(gathered + r * stride + i * REGISTER);
                _mm512_storeu_ps(rows[r].out + from + i * LANES,
                                 _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(block->factors[r])));
            }
    }
}

void batchinfer_attend_int8_tiles(int num_rows, const struct row *rows, const struct work *work, int dim, float softcap)
{
    /* Rows that are not there give what none reads. */
    int8_t queries[TILE_ROWS * MAX_HEAD_DIM] __attribute__((aligned(64)));
    char scores[TILE_ROWS * MOST_STRIDE] __attribute__((aligned(64)));
    struct row_block block;
    /* Room for codes of weights and what is gathered twice, or for scores of a multiple of four blocks; and a line, so
     * that rows are not a power of two apart. */
    const int stride = ((work->num_blocks + JOINED - 1) / JOINED * JOINED + 9) * LANES;
    load_rows(num_rows, rows, dim, queries, dim, &block);
    WRITTEN();
    char *seen = scores + block.begin * REGISTER;
    score_rows(queries, dim, work->blocks, block.begin, block.end, seen, stride * 4L);
    softmax_rows(1, num_rows, rows, &block, (float *)scores, stride, work, dim, softcap);
    round_weights(num_rows, rows, &block, seen, stride * 4L, dim);
    finish_rows(num_rows, rows, &block);
    weigh_rows(num_rows, rows, &block, seen, stride * 4L, work->blocks + work->num_blocks, dim);
}
#endif
