/* Attention's cache in int8 on processors with AMX: a row block's products in tiles, 16 rows at a time.
 *
 * 64 dimensions of a block's keys are a tile as they lie. Of values a tile would be 16 tokens deep, a quarter of what
 * the same time could multiply: rows of four blocks are gathered into one, once for all row blocks of a work item.
 *
 * Tiles are loaded, multiplied and stored between rows of the arithmetic that belongs to the four blocks before: what
 * a tile waits for then takes no time, since the processor, which looks a few hundred instructions ahead, finds other
 * work. For the same reason a row block's products begin before the one before is finished.
 */

#include "attention_int8.h"

#ifdef __AMX_INT8__
enum { MOST_FOURS = MAX_BLOCKS / JOINED, PARTS = MAX_HEAD_DIM / TILE_BYTES };

/* Loops of their own: in one large function the compiler has no registers left for them. */
#define APART __attribute__((noinline)) static void

/* Four blocks' values in 64 dimensions: four tiles, rows [tokens / 4 of a block][block] of 16 dimensions. */
struct gathered {
    char tiles[LANES / 4][TILE_ROWS * TILE_BYTES];
} __attribute__((aligned(64)));

/* What all row blocks of a work item need of its values; `inverse` are their scales. Of blocks that are not there
 * anything may be multiplied by weights of 0. */
static _Thread_local struct {
    struct gathered values[MOST_FOURS][PARTS];
    float inverse[MAX_SPLIT];
} __attribute__((aligned(64))) ready;

/* A row block that is begun. It is worked on from its work item's first block on: queries of a tile are so near to each
 * other that they begin to see in nearly the same one. Rows that are not there give what none reads. */
struct started {
    int8_t queries[TILE_ROWS * MAX_HEAD_DIM];
    int32_t starts[TILE_ROWS * LANES]; /* what sums of products begin with */
    struct row_block block;
    const struct row *rows;
    int num_rows;
    /* What is fetched meanwhile: where results go, and the next row block's queries; of rows that are not there the
     * first one's. */
    const float *results[MOST_ROWS];
    const char *next_queries[MOST_ROWS];
} __attribute__((aligned(64)));

/* A row block's memory: scores, exponents and codes in turn; highest and summed numbers by lane; exact sums. */
struct scratch {
    float scores[TILE_ROWS * (MAX_SPLIT + LANES)];
    __m512 highest[MOST_ROWS], totals[MOST_ROWS];
    int32_t sums[TILE_ROWS * TILE_BYTES];
    int stride; /* of scores: an odd number of registers, so that rows are not a power of two apart */
} __attribute__((aligned(64)));

static void make_ready(const struct work *work, int dim)
{
    const char *const *values = work->blocks + work->num_blocks;
    for (int b = 0; b < work->num_blocks; b++) {
        char *to = ready.values[b / JOINED][0].tiles[0] + b % JOINED * TILE_BYTES;
        for (int i = 0; i < dim; i += LANES)
#pragma GCC unroll 4
            for (int t = 0; t < LANES / 4; t++)
                _mm512_store_si512(to + i / LANES * TILE_ROWS * TILE_BYTES + t * JOINED * TILE_BYTES,
                                   _mm512_loadu_si512(values[b] + ((size_t)t * dim + i) * 4));
        _mm512_store_ps(ready.inverse + b * LANES, power_of(_mm512_loadu_ps(scales_of(values[b], dim)), 1.0f));
    }
    for (int b = work->num_blocks; b % JOINED; b++)
        _mm512_store_ps(ready.inverse + b * LANES, _mm512_setzero_ps());
}

static void start(struct started *begun, int num_rows, const struct row *rows, int num_left, int dim)
{
    begun->rows = rows;
    begun->num_rows = num_rows;
    load_rows(num_rows, rows, dim, begun->queries, dim, &begun->block);
    for (int r = num_rows; r < MOST_ROWS; r++) {
        begun->block.scales[r] = 0.0f;
        begun->block.starts[r] = 0;
    }
    for (int r = 0; r < MOST_ROWS; r++) {
        begun->results[r] = rows[r < num_rows ? r : 0].out;
        begun->next_queries[r] = rows[num_rows + r < num_left ? num_rows + r : 0].query;
        _mm512_store_si512(begun->starts + r * LANES, _mm512_set1_epi32(begun->block.starts[r]));
    }
    WRITTEN();
}

/* ---- Scores: products of queries [TILE_ROWS][dim] and four blocks of keys ----
 *
 * Tiles 0 to 3 are sums, 4 and 5 keys or values, 6 queries or weights, 7 of no meaning. Sums begin with what memory
 * holds: a tile that is set to zero waits for all that was done with it before. With heads of 64 dimensions tile 6
 * keeps the queries from the first scores of a row block to its last. */
#define START_SUM(i) _tile_loadd(i, begun->starts, TILE_BYTES);
#define LOAD_KEYS(i, tile)                                               \
    if (dim == TILE_BYTES) {                                             \
        START_SUM(i)                                                     \
    }                                                                    \
    _tile_loadd(tile, keys[i] + (dim - TILE_BYTES) * LANES, TILE_BYTES);

/* Keys of four blocks from b on; for one that is not there the last one stands in. */
INLINE void four_keys(const struct work *work, int b, const char **keys)
{
#pragma GCC unroll 4
    for (int i = 0; i < JOINED; i++)
        keys[i] = work->blocks[b + i < work->num_blocks ? b + i : work->num_blocks - 1];
}

/* All but the last 64 dimensions; of heads of 64 dimensions nothing. */
INLINE void begin_scores(const struct started *begun, const char *const *keys, int dim)
{
    if (dim == TILE_BYTES)
        return;
    START_SUM(0)
    START_SUM(1)
    START_SUM(2)
    START_SUM(3)
    int i = 0;
    for (; i < dim - TILE_BYTES; i += TILE_BYTES) {
        _tile_loadd(6, begun->queries + i, dim);
        _tile_loadd(4, keys[0] + i * LANES, TILE_BYTES);
        _tile_dpbsud(0, 6, 4);
        _tile_loadd(5, keys[1] + i * LANES, TILE_BYTES);
        _tile_dpbsud(1, 6, 5);
        _tile_loadd(4, keys[2] + i * LANES, TILE_BYTES);
        _tile_dpbsud(2, 6, 4);
        _tile_loadd(5, keys[3] + i * LANES, TILE_BYTES);
        _tile_dpbsud(3, 6, 5);
    }
    _tile_loadd(6, begun->queries + i, dim);
}

APART score(const struct started *begun, const struct work *work, int b, int dim, float *scores, int stride)
{
    const char *keys[JOINED];
    four_keys(work, b, keys);
    if (dim == TILE_BYTES)
        _tile_loadd(6, begun->queries, TILE_BYTES);
    begin_scores(begun, keys, dim);
    LOAD_KEYS(0, 4)
    _tile_dpbsud(0, 6, 4);
    LOAD_KEYS(1, 5)
    _tile_dpbsud(1, 6, 5);
    LOAD_KEYS(2, 4)
    _tile_dpbsud(2, 6, 4);
    LOAD_KEYS(3, 5)
    _tile_dpbsud(3, 6, 5);
    _tile_stored(0, scores, stride * 4L);
    _tile_stored(1, scores + LANES, stride * 4L);
    _tile_stored(2, scores + 2 * LANES, stride * 4L);
    _tile_stored(3, scores + 3 * LANES, stride * 4L);
    WRITTEN();
}

/* ---- Exponents ---- */

/* With each four blocks a line of each row's results, while there are some, and of the next query; all at once they held
 * up what followed. */
INLINE void fetch_beside(const struct started *begun, int r, int b, int dim)
{
    const int line = b / JOINED;
    if (line * LANES < dim)
        __builtin_prefetch(begun->results[r] + line * LANES, 1);
    __builtin_prefetch(begun->next_queries[r] + line % 2 * TILE_BYTES);
}

/* Of the four blocks from b on, all of which all rows see; meanwhile, if there are `more`, a constant, the next four
 * blocks' scores. */
INLINE void exponents_of_four(const int more, const struct started *begun, const struct work *work, int b, int dim,
                              float *scores, int stride, __m512 *highest)
{
    __m512 key_scales[JOINED], minus_scales[JOINED];
    const char *keys[JOINED];
    float *next = scores + JOINED * LANES;
#pragma GCC unroll 4
    for (int i = 0; i < JOINED; i++) {
        key_scales[i] = _mm512_loadu_ps(scales_of(work->blocks[b + i], dim));
        minus_scales[i] = _mm512_loadu_ps(scales_of(work->blocks[work->num_blocks + b + i], dim));
    }
    if (more) {
        four_keys(work, b + JOINED, keys);
        begin_scores(begun, keys, dim);
        LOAD_KEYS(0, 4)
    }
#pragma GCC unroll 16
    for (int r = 0; r < MOST_ROWS; r++) {
        const __m512 scale = _mm512_set1_ps(begun->block.scales[r]);
        __m512 top = highest[r];
#pragma GCC unroll 4
        for (int i = 0; i < JOINED; i++) {
            float *at = scores + r * stride + i * LANES;
            const __m512 e = exponents_of(at, key_scales[i], minus_scales[i], scale, 0.0f);
            _mm512_store_ps(at, e);
            top = _mm512_max_ps(top, e);
        }
        highest[r] = top;
        fetch_beside(begun, r, b, dim);
        WRITTEN();
        if (!more)
            continue;
        if (r == 0)
            _tile_dpbsud(0, 6, 4);
        if (r == 1) {
            LOAD_KEYS(1, 5)
        }
        if (r == 2)
            _tile_dpbsud(1, 6, 5);
        if (r == 3) {
            LOAD_KEYS(2, 4)
        }
        if (r == 4)
            _tile_dpbsud(2, 6, 4);
        if (r == 5) {
            LOAD_KEYS(3, 5)
        }
        if (r == 6)
            _tile_dpbsud(3, 6, 5);
        if (r == 8)
            _tile_stored(0, next, stride * 4L);
        if (r == 10)
            _tile_stored(1, next + LANES, stride * 4L);
        if (r == 12)
            _tile_stored(2, next + 2 * LANES, stride * 4L);
        if (r == 14)
            _tile_stored(3, next + 3 * LANES, stride * 4L);
    }
    WRITTEN();
}

APART exponents_then_scores(const struct started *begun, const struct work *work, int b, int dim, float *scores,
                            int stride, __m512 *highest)
{
    if (dim == TILE_BYTES)
        exponents_of_four(1, begun, work, b, TILE_BYTES, scores, stride, highest);
    else
        exponents_of_four(1, begun, work, b, dim, scores, stride, highest);
}

APART last_exponents(const struct started *begun, const struct work *work, int b, int dim, float *scores, int stride,
                     __m512 *highest)
{
    exponents_of_four(0, begun, work, b, dim, scores, stride, highest);
}

/* Of a row block, with the first four blocks' scores there. */
static void all_exponents(const struct started *begun, const struct work *work, int dim, float softcap,
                          struct scratch *scratch)
{
    const struct row_block *block = &begun->block;
    const int stride = scratch->stride;
    for (int b = 0; b < block->end; b += JOINED) {
        float *scores = scratch->scores + b * LANES;
        const int more = b + JOINED < block->end;
        if (softcap == 0.0f && b >= block->seen_begin && b + JOINED <= block->seen_end) {
            if (more)
                exponents_then_scores(begun, work, b, dim, scores, stride, scratch->highest);
            else
                last_exponents(begun, work, b, dim, scores, stride, scratch->highest);
            continue;
        }
        if (more)
            score(begun, work, b + JOINED, dim, scores + JOINED * LANES, stride);
        for (int i = 0; i < JOINED && b + i < block->end; i++) {
            exponents_of_block(MOST_ROWS, begun->num_rows, begun->rows, block, b + i, scores + i * LANES, stride,
                               scratch->highest, work, dim, softcap);
            /* The unit that multiplies tiles falls asleep after some 1,500 cycles without work, and takes 800 to wake
             * up: it is given some whose result nobody reads. */
            if (softcap != 0.0f)
                _tile_dpbusd(7, 4, 5);
        }
        for (int r = 0; r < MOST_ROWS; r++)
            fetch_beside(begun, r, b, dim);
    }
    for (int i = (block->end + JOINED - 1) / JOINED * LANES; i < dim; i += LANES) /* where blocks are few */
        for (int r = 0; r < MOST_ROWS; r++)
            __builtin_prefetch(begun->results[r] + i, 1);
    hide_behind(MOST_ROWS, block->end, scratch->scores, stride);
}

/* ---- Weights and weighted values ---- */

INLINE void clear_sums(void)
{
    static const int32_t zeros[LANES] __attribute__((aligned(64)));
    _tile_loadd(0, zeros, 0);
    _tile_loadd(1, zeros, 0);
    _tile_loadd(2, zeros, 0);
    _tile_loadd(3, zeros, 0);
}

INLINE void store_sums(int32_t *sums)
{
    WRITTEN(); /* what was there has been read */
    _tile_stored(0, sums, 4 * TILE_BYTES);
    _tile_stored(1, sums + LANES, 4 * TILE_BYTES);
    _tile_stored(2, sums + 2 * LANES, 4 * TILE_BYTES);
    _tile_stored(3, sums + 3 * LANES, 4 * TILE_BYTES);
    WRITTEN();
}

/* Weighted values of four blocks in 64 dimensions are added to sums. */
INLINE void weigh_values(const float *codes, int stride, const struct gathered *values)
{
    _tile_loadd(6, codes, stride * 4L);
    _tile_loadd(4, values->tiles[0], TILE_BYTES);
    _tile_dpbusd(0, 6, 4);
    _tile_loadd(5, values->tiles[1], TILE_BYTES);
    _tile_dpbusd(1, 6, 5);
    _tile_loadd(4, values->tiles[2], TILE_BYTES);
    _tile_dpbusd(2, 6, 4);
    _tile_loadd(5, values->tiles[3], TILE_BYTES);
    _tile_dpbusd(3, 6, 5);
}

/* Codes of four blocks' weights, at the start of their rows' exponents; meanwhile, if these are not the `first`, a
 * constant, weighted values of the four before. */
INLINE void weights_of_four(const int first, const struct started *begun, float *exponents, int stride,
                            const float *inverse, __m512 *totals, const struct gathered *values)
{
#pragma GCC unroll 16
    for (int r = 0; r < MOST_ROWS; r++) {
        if (r % 4 == 0 && r >= 8 && r >= begun->num_rows)
            break;
        float *at = exponents + r * stride;
        const __m512i codes = weigh_four(at, _mm512_set1_ps(begun->block.tops[r]), inverse, totals + r);
        _mm512_store_si512((void *)at, codes);
        WRITTEN();
        if (first)
            continue;
        if (r == 0)
            _tile_loadd(6, exponents - JOINED * LANES, stride * 4L);
        if (r == 1)
            _tile_loadd(4, values->tiles[0], TILE_BYTES);
        if (r == 2)
            _tile_dpbusd(0, 6, 4);
        if (r == 3)
            _tile_loadd(5, values->tiles[1], TILE_BYTES);
        if (r == 4) {
            _tile_dpbusd(1, 6, 5);
            _tile_loadd(4, values->tiles[2], TILE_BYTES);
        }
        if (r == 5)
            _tile_dpbusd(2, 6, 4);
        if (r == 6)
            _tile_loadd(5, values->tiles[3], TILE_BYTES);
        if (r == 7)
            _tile_dpbusd(3, 6, 5);
    }
    WRITTEN();
}

APART first_weights(const struct started *begun, float *exponents, int stride, const float *inverse, __m512 *totals)
{
    weights_of_four(1, begun, exponents, stride, inverse, totals, NULL);
}

APART weights_then_values(const struct started *begun, float *exponents, int stride, const float *inverse,
                          __m512 *totals, const struct gathered *values)
{
    weights_of_four(0, begun, exponents, stride, inverse, totals, values);
}

/* Codes of all weights, in the place of exponents, and sums of the first 64 dimensions. */
static void all_weights(struct started *begun, struct scratch *scratch)
{
    const int stride = scratch->stride;
    const struct gathered *values = ready.values[0];
    clear_sums();
    first_weights(begun, scratch->scores, stride, ready.inverse, scratch->totals);
    int b = JOINED;
    for (; b < begun->block.end; b += JOINED, values += PARTS)
        weights_then_values(begun, scratch->scores + b * LANES, stride, ready.inverse + b * LANES, scratch->totals,
                            values);
    weigh_values(scratch->scores + (b - JOINED) * LANES, stride, values);
    reduce_rows(MOST_ROWS, 0, scratch->totals, begun->block.sums);
    finish_rows(begun->num_rows, begun->rows, &begun->block);
}

/* Sums of 64 dimensions from `from` on, with all codes there. */
static void weigh_part(const struct started *begun, struct scratch *scratch, int from)
{
    const struct gathered *values = ready.values[0] + from / TILE_BYTES;
    clear_sums();
    for (int b = 0; b < begun->block.end; b += JOINED, values += PARTS)
        weigh_values(scratch->scores + b * LANES, scratch->stride, values);
}

/* Rows' results in 64 dimensions from `from` on. */
static void put_out(const struct started *begun, const int32_t *sums, int from)
{
    for (int r = 0; r < begun->num_rows; r++) {
        float *out = begun->rows[r].out + from;
        const __m512 factor = _mm512_set1_ps(begun->block.factors[r]);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const __m512i sum = _mm512_load_si512(sums + (r * 4 + i) * LANES);
            _mm512_storeu_ps(out + i * LANES, _mm512_mul_ps(_mm512_cvtepi32_ps(sum), factor));
        }
    }
}

void batchinfer_attend_int8_tiles(int num_rows, const struct row *rows, struct work *work, int dim, float softcap)
{
    struct started blocks[2], *now = blocks, *next = blocks + 1;
    struct scratch scratch;
    scratch.stride = ((work->num_blocks + JOINED - 1) / JOINED * JOINED | 1) * LANES;
    if (!work->is_ready)
        make_ready(work, dim);
    work->is_ready = 1;
    start(now, num_rows < MOST_ROWS ? num_rows : MOST_ROWS, rows, num_rows, dim);
    score(now, work, 0, dim, scratch.scores, scratch.stride);
    for (int left = num_rows; left;) {
        for (int r = 0; r < MOST_ROWS; r++) {
            scratch.highest[r] = _mm512_set1_ps(-INFINITY);
            scratch.totals[r] = _mm512_setzero_ps();
        }
        all_exponents(now, work, dim, softcap, &scratch);
        find_tops(MOST_ROWS, scratch.highest, &now->block);
        all_weights(now, &scratch);
        int from = 0;
        for (; from < dim - TILE_BYTES; from += TILE_BYTES) {
            store_sums(scratch.sums);
            put_out(now, scratch.sums, from);
            weigh_part(now, &scratch, from + TILE_BYTES);
        }
        left -= now->num_rows;
        if (left)
            start(next, left < MOST_ROWS ? left : MOST_ROWS, now->rows + now->num_rows, left, dim);
        store_sums(scratch.sums);
        if (left)
            score(next, work, 0, dim, scratch.scores, scratch.stride);
        put_out(now, scratch.sums, from);
        struct started *done = now;
        now = next;
        next = done;
    }
}
#endif
