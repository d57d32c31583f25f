/* What attention is told, and how it is called; attention.py fills these. */

#ifndef BATCHINFER_ATTENTION_H
#define BATCHINFER_ATTENTION_H

#include <stdint.h>

/* One step's plan; the same in attention.py. Positions are in sequences, tokens are rows of q. */
struct step {
    /* Tiles: queries members[tile_start ..][tile_count], blocks found through a row of block_tables. */
    const int64_t *tile_start, *tile_count, *tile_chunk, *tile_split, *members;
    /* Work items in the order in which they are begun: tile * num_kv_heads + KV head. num_heavy of them, the first,
     * are much work each. */
    const int64_t *items;
    const int64_t *positions, *block_tables;
    /* A token's first partial result, -1 where it sees one split only; the tokens that see several. */
    const int64_t *entry, *several;
    /* block * LANES + offset of each token; blocks whose values are cleared first. */
    const int64_t *slots, *fresh_blocks;
    int64_t num_tokens, num_items, num_heavy, num_several, num_fresh, table_width;
    int64_t num_heads, num_kv_heads, head_dim, split_size, window; /* window: 0 is none */
};

/* One layer's tensors. Strides of q, k and v are in numbers, between tokens. */
struct layer {
    const float *q, *k, *v;
    int64_t q_stride, k_stride, v_stride;
    char *k_cache, *v_cache;
    int64_t block_stride, head_stride; /* in bytes, of both caches */
    int64_t format;                    /* of both caches: a number of `formats` */
    float *out;                  /* [tokens, heads, head_dim] */
    float *part, *part_top_sum;  /* [entries, heads, head_dim] and [entries, heads, 2] */
    char *queries;               /* [tokens, heads, 2 * head_dim]: scratch */
    const uint8_t *read;         /* by token: whether its attention is read; NULL: all of them are */
    float scale, softcap;        /* of the query; and 0, or what the hyperbolic tangent is multiplied by */
};

/* Stores the step's keys and values, then attends to the cache. */
void batchinfer_attention(const struct step *step, const struct layer *layer, int threads);

/* Its parts in their order, for code that is inside a parallel region. All of the region's threads call those without a
 * token, which end with a barrier; the second begins with one, and what `queue`, one for all of them, holds is of no
 * meaning. Storing a token prepares its query. */
void batchinfer_clear_values(const struct step *step, const struct layer *layer);
void batchinfer_store_token(const struct step *step, const struct layer *layer, int64_t token);
void batchinfer_attend_tiles(const struct step *step, const struct layer *layer, int64_t *queue);

/* Adds the splits of a token, of which it sees several, in their order. */
void batchinfer_merge_token(const struct step *step, const struct layer *layer, int64_t token);

#endif
