/* Parts of layers, for one row or for code that is inside a parallel region. */

#ifndef BATCHINFER_LAYERS_H
#define BATCHINFER_LAYERS_H

#include "quantize.h"

/* A linear layer's weights; panels.h says how they lie. */
struct packed {
    const char *bytes, *fine;
    const uint16_t *plain;
    long width; /* of a row of activations, padded to a multiple of TURNED */
    /* Output features that are kept as bytes, behind them as fine bytes, behind these as bfloat16. */
    long num_values, num_fine, num_plain;
};

/* Floats from one row to the next where a layer's gated outputs lie: an odd number of lines, since rows of an even one
 * get in each other's way in the first-level cache. */
INLINE long gated_stride(long width) { return (width / 16 | 1) * 16; }

/* ---- Of one row ---- */

/* `width` floats to row t of `to`. */
void batchinfer_quantize_row(const float *x, long width, const struct quantized *to, long t);

/* The same of x / sqrt(mean of x^2 + eps) * weight. */
void batchinfer_rms_norm_row(const float *x, const float *weight, float eps, long width, const struct quantized *to,
                             long t);

/* A row of weights [width]: turned float32 [padded] to bytes and their scale, 0 where all are too small, NaN where one
 * is not finite. fine, what is left of them in units of their step / FINER, may be NULL. */
void batchinfer_quantize_weight_row(const float *row, long width, float *turned, int8_t *values, int8_t *fine,
                                    float *scale);

/* Rotary embedding of one token's heads; cos, sin: [half]. */
void batchinfer_rotate(float *x, const float *cos, const float *sin, int heads, int head_dim, int half);

/* ---- Of all rows, called by all threads of a team; these end with a barrier ---- */

/* y [rows, num_values + num_fine + num_plain] = x W^T + bias, or y += that. bias may be NULL. */
void batchinfer_linear_part(const struct quantized *x, long rows, const struct packed *w, const float *bias, float *y,
                            int add);

/* y = quantized silu(x G^T) * (x U^T). A panel of w holds 16 features of G and the same 16 of U; bias [panels][PANEL]
 * likewise, or NULL. y is padded to whole blocks, and so is the number of panels. inner: scratch, [rows][gated_stride]
 * floats. */
void batchinfer_gated_part(const struct quantized *x, long rows, const struct packed *w, const float *bias,
                           float *inner, const struct quantized *y);

#endif
