/* All decoder layers of a step in one parallel region; decoder.py says how this is called.
 *
 * A layer is the very operations of the functions that do its parts one by one (quantize.c, int8.c, rope.c,
 * attention.c), and so gives the same bytes. Attention is what tokens have in common: between two layers' attention a
 * thread takes a share of the rows through everything, see `share_rows`.
 */

#include <omp.h>
#include <string.h>

#include "attention.h"
#include "layers.h"
#include "tiles.h"

/* A share: enough rows to be worth reading all weights of a layer for, few enough to stay in the second-level cache,
 * which is larger where there are tiles. */
enum { ROWS_AT_A_TIME = 8, LEAST_SHARE = 32 };
INLINE long most_share(void) { return batchinfer_tiles ? 512 : 256; }

/* Norms' weights [hidden]; biases as the products take them, or NULL. */
struct decoder_layer {
    struct packed qkv, o, gate_up, down;
    const float *input_norm, *post_norm;
    const float *qkv_bias, *o_bias, *gate_up_bias, *down_bias;
};

struct decoder {
    const struct decoder_layer *layers;
    long num_layers, hidden_size, num_heads, num_kv_heads, head_dim;
    float eps;
};

/* One step. By layer: its plan, and what attention is told of it but for q, k, v, scratch and where results go. */
struct decoder_step {
    long num_tokens;
    float *hidden;          /* [num_tokens, hidden_size], overwritten */
    const float *cos, *sin; /* [num_tokens, half] */
    long half;
    const struct step *const *plans;
    const struct layer *const *caches;
    float *part, *part_top_sum; /* attention's, for the layer that has most of them */
    /* The last layer's result goes to `out` [num_wanted, hidden_size], these rows of it; or all stay in `hidden`, and
     * num_wanted is -1. */
    const int64_t *wanted;
    long num_wanted;
    float *out;
    char *scratch; /* batchinfer_decoder_scratch_bytes, aligned to 64 */
};

/* What one pass leaves to the next. `x` is what each product takes in turn, but for the last one, which takes `inner`:
 * that is written while x is read. */
struct buffers {
    struct quantized x, inner;
    float *qkv, *attended, *gated; /* gated: what `inner` is made of */
    char *queries;
    uint8_t *read; /* by token, whether it is wanted of the last layer */
};

/* Scratch as it is handed out; without a start it is only counted. */
struct arena {
    char *start;
    size_t used;
};

static void *take(struct arena *arena, size_t bytes)
{
    void *found = arena->start ? arena->start + arena->used : NULL;
    arena->used += (bytes + 63) / 64 * 64;
    return found;
}

static struct quantized take_quantized(struct arena *arena, long rows, long width, int has_fine)
{
    const long padded = padded_to_blocks(width);
    struct quantized taken;
    taken.values = take(arena, rows * padded);
    taken.fine = has_fine ? take(arena, rows * padded) : NULL;
    taken.plain = NULL;
    taken.scales = take(arena, rows * groups_of(padded) * sizeof(float));
    return taken;
}

static struct buffers lay_out(const struct decoder *decoder, long rows, struct arena *arena)
{
    const long q_size = decoder->num_heads * decoder->head_dim, kv_size = decoder->num_kv_heads * decoder->head_dim;
    const long hidden = decoder->hidden_size;
    struct buffers found;
    found.x = take_quantized(arena, rows, hidden > q_size ? hidden : q_size, 1);
    found.inner = take_quantized(arena, rows, decoder->layers[0].down.width, 0);
    found.gated = take(arena, rows * gated_stride(decoder->layers[0].down.width) * sizeof(float));
    found.qkv = take(arena, rows * (q_size + 2 * kv_size) * sizeof(float));
    found.attended = take(arena, rows * q_size * sizeof(float));
    found.queries = take(arena, rows * q_size * 2);
    found.read = take(arena, rows);
    return found;
}

/* Bytes of scratch for a step of `rows` tokens. */
long batchinfer_decoder_scratch_bytes(const struct decoder *decoder, long rows)
{
    struct arena arena = {NULL, 0};
    lay_out(decoder, rows, &arena);
    return (long)arena.used;
}

/* As a layer takes its activations: with what is finer only where it has features for that. */
static struct quantized for_layer(const struct quantized *buffer, const struct packed *w)
{
    struct quantized x = *buffer;
    if (!w->num_fine)
        x.fine = NULL;
    return x;
}

/* Whether of this layer's result only some rows are read. */
static int is_last(const struct decoder *decoder, const struct decoder_step *step, long at)
{
    return at == decoder->num_layers - 1 && step->num_wanted >= 0;
}

/* Of a buffer for rows of that width: what is there for rows from `first` on, of that or a smaller width. */
static struct quantized from_row(const struct quantized *buffer, long first, long width)
{
    const long padded = padded_to_blocks(width);
    return (struct quantized){buffer->values + first * padded, buffer->scales + first * groups_of(padded),
                              buffer->fine ? buffer->fine + first * padded : NULL, NULL};
}

/* A layer as attention is told of it. */
static struct layer attention_of(const struct decoder *decoder, const struct decoder_step *step, long at,
                                 const struct buffers *buffers)
{
    const long q_size = decoder->num_heads * decoder->head_dim, kv_size = decoder->num_kv_heads * decoder->head_dim;
    struct layer attention = *step->caches[at];
    attention.q = buffers->qkv;
    attention.k = buffers->qkv + q_size;
    attention.v = buffers->qkv + q_size + kv_size;
    attention.q_stride = attention.k_stride = attention.v_stride = q_size + 2 * kv_size;
    attention.out = buffers->attended;
    attention.part = step->part;
    attention.part_top_sum = step->part_top_sum;
    attention.queries = buffers->queries;
    attention.read = is_last(decoder, step, at) ? buffers->read : NULL;
    return attention;
}

/* What is read next: products of many rows leave them further away than in the first-level cache. */
INLINE void fetch(const float *row, long width)
{
    for (long i = 0; i < width; i += 16)
        _mm_prefetch((const char *)(row + i), _MM_HINT_T0);
}

/* What comes before attention, for tokens first .. stop. */
static void begin_layer(const struct decoder *decoder, const struct decoder_step *step, long at,
                        const struct buffers *buffers, long first, long stop)
{
    const struct decoder_layer *layer = decoder->layers + at;
    const long hidden = decoder->hidden_size, heads = decoder->num_heads, kv_heads = decoder->num_kv_heads;
    const long dim = decoder->head_dim, q_size = heads * dim, qkv_size = q_size + 2 * kv_heads * dim;
    const long rows = stop - first, half = step->half;

    const struct quantized here = from_row(&buffers->x, first, hidden > q_size ? hidden : q_size);
    const struct quantized normed = for_layer(&here, &layer->qkv);
#pragma omp for schedule(dynamic, ROWS_AT_A_TIME)
    for (long r = 0; r < rows; r++) {
        const float *row = step->hidden + (first + r) * hidden;
        batchinfer_rms_norm_row(row, layer->input_norm, decoder->eps, hidden, &normed, r);
    }
    batchinfer_linear_part(&normed, rows, &layer->qkv, layer->qkv_bias, buffers->qkv + first * qkv_size, 0);

    const struct layer attention = attention_of(decoder, step, at, buffers);
#pragma omp for schedule(dynamic, ROWS_AT_A_TIME)
    for (long t = first; t < stop; t++) {
        const float *cos = step->cos + t * half, *sin = step->sin + t * half;
        float *row = buffers->qkv + t * qkv_size;
        fetch(row + qkv_size, t + 1 < stop ? qkv_size : 0);
        batchinfer_rotate(row, cos, sin, (int)heads, (int)dim, (int)half);
        batchinfer_rotate(row + q_size, cos, sin, (int)kv_heads, (int)dim, (int)half);
        batchinfer_store_token(step->plans[at], &attention, t);
    }
}

/* What comes behind it, for rows first .. stop of the layer's result, then the next layer's beginning. */
static void end_layer(const struct decoder *decoder, const struct decoder_step *step, long at,
                      const struct buffers *buffers, long first, long stop)
{
    const struct decoder_layer *layer = decoder->layers + at;
    const struct step *plan = step->plans[at];
    const long hidden = decoder->hidden_size, q_size = decoder->num_heads * decoder->head_dim;
    const long rows = stop - first;
    const int some = is_last(decoder, step, at);
    float *stream = (some ? step->out : step->hidden) + first * hidden;

    const struct layer attention = attention_of(decoder, step, at, buffers);
    const struct quantized here = from_row(&buffers->x, first, hidden > q_size ? hidden : q_size);
    const struct quantized taken = for_layer(&here, &layer->o);
#pragma omp for schedule(dynamic, ROWS_AT_A_TIME)
    for (long r = 0; r < rows; r++) {
        const long t = some ? step->wanted[first + r] : first + r;
        if (plan->entry[t] >= 0)
            batchinfer_merge_token(plan, &attention, t);
        batchinfer_quantize_row(buffers->attended + t * q_size, q_size, &taken, r);
        if (some)
            memcpy(stream + r * hidden, step->hidden + t * hidden, hidden * sizeof(float));
    }
    batchinfer_linear_part(&taken, rows, &layer->o, layer->o_bias, stream, 1);

    const struct quantized again = for_layer(&here, &layer->gate_up);
#pragma omp for schedule(dynamic, ROWS_AT_A_TIME)
    for (long r = 0; r < rows; r++)
        batchinfer_rms_norm_row(stream + r * hidden, layer->post_norm, decoder->eps, hidden, &again, r);
    const struct quantized at_inner = from_row(&buffers->inner, first, layer->down.width);
    const struct quantized inner = for_layer(&at_inner, &layer->down);
    batchinfer_gated_part(&again, rows, &layer->gate_up, layer->gate_up_bias,
                          buffers->gated + first * gated_stride(layer->down.width), &inner);
    batchinfer_linear_part(&inner, rows, &layer->down, layer->down_bias, stream, 1);

    if (at + 1 < decoder->num_layers)
        begin_layer(decoder, step, at + 1, buffers, first, stop);
}

typedef void work_on_rows(const struct decoder *decoder, const struct decoder_step *step, long at,
                          const struct buffers *buffers, long first, long stop);

/* Shares of the rows go through all of `work`, each by one thread, as a team of its own: what a row leaves for its next
 * product stays in that core's caches, and nobody waits for others in between. Where threads would have few rows each,
 * all are one team and share out the columns, since every team reads all weights. */
static void share_rows(work_on_rows *work, const struct decoder *decoder, const struct decoder_step *step, long at,
                       const struct buffers *buffers, long rows)
{
    const long threads = omp_get_num_threads();
    if (rows < LEAST_SHARE * threads) {
        work(decoder, step, at, buffers, 0, rows);
        return;
    }
    const long most = most_share() * threads, turns = (rows + most - 1) / most, shares = turns * threads;
#pragma omp for schedule(dynamic, 1)
    for (long s = 0; s < shares; s++)
#pragma omp parallel num_threads(1)
        work(decoder, step, at, buffers, rows * s / shares, rows * (s + 1) / shares);
}

void batchinfer_decoder(const struct decoder *decoder, const struct decoder_step *step, int threads)
{
    struct arena arena = {step->scratch, 0};
    const struct buffers buffers = lay_out(decoder, step->num_tokens, &arena);
    int64_t queue;
    if (step->num_wanted >= 0) {
        memset(buffers.read, 0, step->num_tokens);
        for (long i = 0; i < step->num_wanted; i++)
            buffers.read[step->wanted[i]] = 1;
    }
#pragma omp parallel num_threads(threads)
    {
        batchinfer_clear_values(step->plans[0], step->caches[0]);
        share_rows(begin_layer, decoder, step, 0, &buffers, step->num_tokens);
        for (long at = 0; at < decoder->num_layers; at++) {
            if (at + 1 < decoder->num_layers)
                batchinfer_clear_values(step->plans[at + 1], step->caches[at + 1]);
            const struct layer attention = attention_of(decoder, step, at, &buffers);
            batchinfer_attend_tiles(step->plans[at], &attention, &queue);
            share_rows(end_layer, decoder, step, at, &buffers,
                       is_last(decoder, step, at) ? step->num_wanted : step->num_tokens);
        }
    }
}
