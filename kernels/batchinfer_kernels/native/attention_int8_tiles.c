/* Attention's cache in int8 on processors with AMX: a row block's products in tiles, 16 rows at a time.
 *
 * 64 dimensions of a block's keys are a tile as they lie. Of values a tile would be 16 tokens deep, a quarter of what
 * the same time could multiply: rows of four blocks are gathered into one first. All of it lies in the memory of the
 * scores, which are dead by then: what is written here must be in the first-level cache, which is no larger than a
 * split's scores, keys and values.
 */

#include "attention_int8.h"

#ifdef __AMX_INT8__
enum { GATHERED = JOINED * TILE_BYTES, MOST_STRIDE = (MAX_SPLIT + 9 * LANES) * 4 };

/* Tiles 0 to 3 are sums, 4 and 5 keys or values, 6 queries or weights, 7 of no meaning.
 *
 * To two columns of 16 scores: products of queries [TILE_ROWS][dim] and two blocks of keys. */
#define SCORE_PAIR(a, b)                               \
    _tile_loadd(a, starts, TILE_BYTES);                \
    _tile_loadd(b, starts, TILE_BYTES);                \
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
INLINE void score_rows(const int8_t *queries, const int32_t *starts, int dim, const char *const *keys, int begin,
                       int end, char *scores, long stride)
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

/* Values of blocks begin .. begin + 3, if before `end`, in 64 dimensions: four tiles side by side, in the order of
 * `weigh_four`. Of blocks that are not there anything may be multiplied by a weight of 0. */
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
    int32_t starts[TILE_ROWS * LANES] __attribute__((aligned(64)));
    struct row_block block = {.scales = {0}};
    /* Room for codes of weights and what is gathered twice, or for scores of a multiple of four blocks; an odd number
     * of lines, so that rows are not a power of two apart. */
    const int joined = (work->num_blocks + 2 * JOINED - 2) / JOINED; /* wherever the first block lies */
    const int wide = joined * JOINED > joined + 8 ? joined * JOINED : joined + 8, stride = (wide | 1) * LANES;
    load_rows(num_rows, rows, dim, queries, dim, &block);
    for (int r = 0; r < num_rows; r++)
        _mm512_store_si512(starts + r * LANES, _mm512_set1_epi32(block.starts[r]));
    WRITTEN();
    char *seen = scores + block.begin * REGISTER;
    score_rows(queries, starts, dim, work->blocks, block.begin, block.end, seen, stride * 4L);
    softmax_rows(1, MOST_ROWS, num_rows, rows, &block, (float *)scores, stride, (uint8_t *)seen, stride * 4, work, dim,
                 softcap);
    WRITTEN();
    finish_rows(num_rows, rows, &block);
    weigh_rows(num_rows, rows, &block, seen, stride * 4L, work->blocks + work->num_blocks, dim);
}
#endif
