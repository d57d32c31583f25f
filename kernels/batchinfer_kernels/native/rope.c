/* Rotary embedding in place; see `reference.rope` for what is computed and rope.py for the caller. */

#include <stddef.h>

#include "layers.h"

void batchinfer_rotate(float *x, const float *cos, const float *sin, int heads, int head_dim, int half)
{
    for (int h = 0; h < heads; h++) {
        float *restrict first = x + (size_t)h * head_dim, *restrict second = first + half;
        int i = 0;
        for (; i + 16 <= half; i += 16) {
            const __m512 a = _mm512_loadu_ps(first + i), b = _mm512_loadu_ps(second + i);
            const __m512 c = _mm512_loadu_ps(cos + i), s = _mm512_loadu_ps(sin + i);
            _mm512_storeu_ps(first + i, _mm512_sub_ps(_mm512_mul_ps(a, c), _mm512_mul_ps(b, s)));
            _mm512_storeu_ps(second + i, _mm512_add_ps(_mm512_mul_ps(b, c), _mm512_mul_ps(a, s)));
        }
        for (; i < half; i++) {
            const float a = first[i], b = second[i];
            first[i] = a * cos[i] - b * sin[i];
            second[i] = b * cos[i] + a * sin[i];
        }
    }
}

/* q, k: heads of head_dim floats, a token every q_stride, k_stride floats; cos, sin: [tokens, half]. */
void batchinfer_rope(float *q, float *k, const float *cos, const float *sin, long tokens, int q_heads, int k_heads,
                     long q_stride, long k_stride, int head_dim, int half, int threads)
{
#pragma omp parallel for schedule(static) num_threads(threads) if (tokens > 4)
    for (long t = 0; t < tokens; t++) {
        const float *c = cos + t * half, *s = sin + t * half;
        batchinfer_rotate(q + t * q_stride, c, s, q_heads, head_dim, half);
        batchinfer_rotate(k + t * k_stride, c, s, k_heads, head_dim, half);
    }
}
