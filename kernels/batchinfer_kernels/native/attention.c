/* Attention over a KV cache that is packed for 512-bit registers; attention.py says how it is called. The files
 * attention_*.c hold what depends on the format of the cache.
 *
 * A tile is a list of queries and one split of the KV that they attend to. Its rows (a query and one of the heads that
 * share a KV head) are worked on some at a time: scores, softmax and values of these stay in the first-level cache.
 * Scores are in units of log 2, so that weights are powers of two.
 *
 * What a row gives for a split depends on nothing else, whatever the number of rows beside it: each score and each
 * output is in bfloat16 one chain of additions in the order of the dimensions or tokens, and in int8 a sum of whole
 * numbers, exact in any order. A token that the row does not see has a weight of exactly zero, and its value is finite
 * (formats' `clear` and `write` see to that), so that it adds nothing.
 */

#define _DEFAULT_SOURCE /* madvise */

#include <omp.h>
#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "kv_format.h"

/* By `layer.format`; the same in attention.py. */
static const struct format *const formats[] = {&batchinfer_bf16_format, &batchinfer_int8_format};

/* A thread takes the SHARES-th part of its equal share of what is left in the queue: an item at least, and so many tiles'
 * items at most. */
enum { MOST_CLAIMED = 16, SHARES = 8 };

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
    work->is_ready = 0;
    for (int b = 0; b < count; b++) {
        const int64_t at = table[lowest + b] * layer->block_stride + kv_head * layer->head_stride;
        work->blocks[b] = layer->k_cache + at;
        work->blocks[count + b] = layer->v_cache + at;
    }
}

/* `at_a_time`: rows, as the format wants them. */
static void attend_work(const struct step *step, const struct layer *layer, struct work *work, int at_a_time)
{
    const int64_t heads = step->num_heads, group = heads / step->num_kv_heads, dim = step->head_dim;
    const int64_t *members = step->members + step->tile_start[work->tile], count = step->tile_count[work->tile];
    const int64_t begin = work->split * step->split_size, end = begin + step->split_size;
    const struct format *format = formats[layer->format];
    struct row rows[MOST_AT_ONCE];
    int filled = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t token = members[i], position = step->positions[token], first = first_seen(step, position);
        if (position < begin || first >= end)
            continue; /* sees nothing of this split, while others of its tile do */
        if (layer->read && !layer->read[token])
            continue;
        /* Its results of this split, where it sees several. */
        const int64_t entry = step->entry[token], part = entry + work->split - first / step->split_size;
        for (int64_t g = 0; g < group; g++) {
            const int64_t head = work->kv_head * group + g, at = part * heads + head;
            struct row *row = rows + filled++;
            row->query = layer->queries + (token * heads + head) * 2 * dim;
            row->first = (int)((first > work->origin ? first : work->origin) - work->origin);
            row->last = (int)((position < end ? position : end - 1) - work->origin);
            row->out = entry < 0 ? layer->out + (token * heads + head) * dim : layer->part + at * dim;
            row->top_sum = entry < 0 ? NULL : layer->part_top_sum + at * 2;
            if (filled == at_a_time) {
                format->attend(filled, rows, work, (int)dim, layer->softcap);
                filled = 0;
            }
        }
    }
    if (filled)
        format->attend(filled, rows, work, (int)dim, layer->softcap);
}

/* Takes the next items from the queue: as many as keep those together that share blocks, fewer towards the end. */
static int64_t claim(const struct step *step, int64_t *queue, int64_t *stop)
{
    int64_t item, taken;
#pragma omp atomic read
    taken = *queue;
    const int64_t most = MOST_CLAIMED * step->num_kv_heads;
    const int64_t share = (step->num_items - taken) / (SHARES * omp_get_num_threads());
    const int64_t count = taken < step->num_heavy || share < 1 ? 1 : share < most ? share : most;
#pragma omp atomic capture
    {
        item = *queue;
        *queue += count;
    }
    *stop = item + count < step->num_items ? item + count : step->num_items;
    return item;
}

/* Items from the queue until there are none. The next one is known before one is begun, so that its keys can be
 * fetched. */
static void attend_items(const struct step *step, const struct layer *layer, int64_t *queue)
{
    struct work works[2], *now = works, *next = works + 1;
    int64_t stop, item = claim(step, queue, &stop);
    if (item >= stop)
        return;
    const struct format *format = formats[layer->format];
    const int at_a_time = format->begin((int)step->head_dim);
    prepare(step, layer, step->items[item], now);
    for (;;) {
        if (++item >= stop)
            item = claim(step, queue, &stop);
        const int more = item < stop;
        if (more)
            prepare(step, layer, step->items[item], next);
        const struct work *then = more ? next : now;
        for (int i = 0; i < now->num_blocks; i++)
            now->blocks[2 * now->num_blocks + i] = then->blocks[i < then->num_blocks ? i : 0];
        attend_work(step, layer, now, at_a_time);
        if (!more)
            break;
        struct work *done = now;
        now = next;
        next = done;
    }
    format->end(at_a_time);
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
            for (int64_t i = 0; i < dim / LANES; i++) { /* the next token's results mostly lie behind this one's */
                __builtin_prefetch(part + splits * heads * dim + i * LANES);
                total[i] = _mm512_fmadd_ps(weight, _mm512_loadu_ps(part + i * LANES), total[i]);
            }
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
        formats[layer->format]->clear(layer->v_cache + step->fresh_blocks[i / kv_heads] * layer->block_stride +
                                          i % kv_heads * layer->head_stride,
                                      (int)dim);
}

void batchinfer_store_token(const struct step *step, const struct layer *layer, int64_t token)
{
    const struct format *format = formats[layer->format];
    const int64_t dim = step->head_dim;
    for (int64_t h = 0; h < step->num_heads; h++)
        format->prepare(layer->q + token * layer->q_stride + h * dim,
                        layer->queries + (token * step->num_heads + h) * 2 * dim, (int)dim, layer->scale);
    const int64_t slot = step->slots[token], then = token + 1 < step->num_tokens ? step->slots[token + 1] : slot;
    for (int64_t h = 0; h < step->num_kv_heads; h++) {
        const int64_t at = slot / LANES * layer->block_stride + h * layer->head_stride;
        if (then / LANES != slot / LANES) {
            const int64_t next = then / LANES * layer->block_stride + h * layer->head_stride;
            format->fetch(layer->k_cache + next, layer->v_cache + next, (int)dim, (int)(then % LANES));
        }
        format->write(layer->k + token * layer->k_stride + h * dim, layer->v + token * layer->v_stride + h * dim,
                      layer->k_cache + at, layer->v_cache + at, (int)dim, (int)(slot % LANES));
    }
}

/* Copies blocks sources[i] to destinations[i] in every layer. All sources are read before a destination is written.
 * scratch: [threads][count][bytes], `bytes` of a block of one head. */
void batchinfer_copy_blocks(const struct layer *const *layers, long num_layers, long kv_heads, const int64_t *sources,
                            const int64_t *destinations, long count, long bytes, char *scratch, int threads)
{
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads)
    for (long l = 0; l < num_layers; l++)
        for (long h = 0; h < kv_heads; h++)
            for (int which = 0; which < 2; which++) {
                char *cache = (which ? layers[l]->v_cache : layers[l]->k_cache) + h * layers[l]->head_stride;
                char *between = scratch + omp_get_thread_num() * count * bytes;
                for (long i = 0; i < count; i++)
                    memcpy(between + i * bytes, cache + sources[i] * layers[l]->block_stride, bytes);
                for (long i = 0; i < count; i++)
                    memcpy(cache + destinations[i] * layers[l]->block_stride, between + i * bytes, bytes);
            }
}

/* Has the system give memory to blocks first .. stop of every layer, as if they were written, without changing them.
 * Where it does not know how, it gives it when they are. */
void batchinfer_fault_in(const struct layer *const *layers, long num_layers, long kv_heads, long first, long stop,
                         int threads)
{
#ifdef __linux__
    enum { POPULATE_WRITE = 23 }; /* MADV_POPULATE_WRITE, which older headers lack */
    const uintptr_t page = sysconf(_SC_PAGESIZE);
#pragma omp parallel for collapse(2) schedule(dynamic, 1) num_threads(threads)
    for (long l = 0; l < num_layers; l++)
        for (long h = 0; h < kv_heads; h++) {
            const uintptr_t cache = (uintptr_t)(layers[l]->k_cache + h * layers[l]->head_stride); /* values between */
            const uintptr_t from = (cache + first * layers[l]->block_stride) / page * page;
            (void)madvise((void *)from, cache + stop * layers[l]->block_stride - from, POPULATE_WRITE);
        }
#endif
}

void batchinfer_attend_tiles(const struct step *step, const struct layer *layer, int64_t *queue)
{
#pragma omp single
    *queue = 0;
    attend_items(step, layer, queue);
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
