/* What `attention.c`, which finds the work, and the formats of the caches share. */

#ifndef BATCHINFER_KV_FORMAT_H
#define BATCHINFER_KV_FORMAT_H

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "attention.h"
#include "bf16.h"

/* Rows are worked on ROWS at a time, since that many sums fit in registers, MOST_ROWS in tiles; a format is given up to
 * MOST_AT_ONCE. */
enum {
    LANES = 16,
    ROWS = 6,
    MOST_ROWS = 16,
    MOST_AT_ONCE = 8 * MOST_ROWS,
    MAX_SPLIT = 1024,
    MAX_HEAD_DIM = 256,
    MAX_BLOCKS = MAX_SPLIT / LANES,
    REGISTER = 64
};

/* A work item: a tile and KV head, and the blocks of the split that its queries see, the first at position `origin` of
 * the sequence: their keys, then their values, then the keys that the thread works on next. While blocks[i] is worked
 * on, blocks[i + num_blocks] is fetched from memory: waiting for it took longer than computing. (Not in tiles, which
 * were slower by it.) */
struct work {
    int64_t tile, kv_head, split, origin;
    int num_blocks;
    int is_ready; /* whether its format has made ready what several calls for it need; 0 at first */
    const char *blocks[3 * MAX_BLOCKS];
};

/* A query and head: where its results go, and what it sees: tokens first .. last, counted from the work's origin. */
struct row {
    const char *query; /* as the format prepares it */
    float *out, *top_sum; /* top_sum: NULL where out is the final result */
    int first, last;
};

/* Attention of a number of rows, which the function knows, to a work item's blocks. */
typedef void attend_rows_of(const struct row *rows, const struct work *work, int dim, float softcap);

/* What is done with blocks of one format, each of one head. */
struct format {
    /* Gives a block finite values. */
    void (*clear)(char *values, int dim);
    /* Stores a token's key and value at an offset of a block. Threads may be storing other tokens of it. */
    void (*write)(const float *key, const float *value, char *keys, char *values, int dim, int offset);
    /* Fetches the lines that it will write to. */
    void (*fetch)(const char *keys, const char *values, int dim, int offset);
    /* A query, with the scale of its scores, in 2 * dim bytes. */
    void (*prepare)(const float *query, char *prepared, int dim, float scale);
    /* A thread calls `begin` before it attends, which says how many rows to work on at a time, MOST_AT_ONCE at most,
     * then `attend` with up to so many, and `end`, which it tells that number. All calls for a work come from one thread,
     * with none for another between them: what is made ready lies in the thread's own memory. */
    int (*begin)(int dim);
    void (*attend)(int num_rows, const struct row *rows, struct work *work, int dim, float softcap);
    void (*end)(int at_a_time);
};

extern const struct format batchinfer_bf16_format, batchinfer_int8_format;

/* Fetches memory that is to be written, in time: stores that waited for it held up all behind them. */
INLINE void fetch_to_write(const void *memory, int bytes)
{
    for (int i = 0; i < bytes; i += REGISTER)
        __builtin_prefetch((const char *)memory + i, 1);
}

INLINE void fetch_results(const struct row *row, int dim) { fetch_to_write(row->out, dim * (int)sizeof(float)); }

/* Which of the LANES tokens from `at` on a row sees. */
INLINE __mmask16 seen_lanes(const struct row *row, int at)
{
    const int hidden = row->first - at, seen = row->last - at + 1;
    const unsigned low = hidden <= 0 ? 0u : hidden >= LANES ? 0xFFFFu : (1u << hidden) - 1;
    const unsigned high = seen >= LANES ? 0xFFFFu : seen <= 0 ? 0u : (1u << seen) - 1;
    return (__mmask16)(high & ~low);
}

#endif
