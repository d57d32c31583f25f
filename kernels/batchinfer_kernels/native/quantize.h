/* Activations as bytes: groups of GROUP values of one row, each with a scale and a zero (see int8.py of the package). */

#ifndef BATCHINFER_QUANTIZE_H
#define BATCHINFER_QUANTIZE_H

#include <math.h>

#include "bf16.h"

enum { GROUP = 64, GROUP_REGISTERS = GROUP / 16 };

/* Groups of all rows: values [rows, padded], scales and zeros [rows, padded / GROUP], plain [rows, padded] bfloat16.
 * values or plain may be NULL: then that is not made. */
struct quantized {
    uint8_t *values;
    float *scales;
    int32_t *zeros;
    uint16_t *plain;
};

INLINE void quantize_group(const __m512 x[GROUP_REGISTERS], uint8_t *values, float *scale, int32_t *zero)
{
    const __m512 none = _mm512_setzero_ps();
    __m512 low = none, high = none, sick = none;
    for (int i = 0; i < GROUP_REGISTERS; i++) {
        low = _mm512_min_ps(low, x[i]);
        high = _mm512_max_ps(high, x[i]);
        sick = _mm512_fmadd_ps(x[i], none, sick); /* NaN from NaN and from infinity */
    }
    const float lowest = _mm512_reduce_min_ps(low), range = _mm512_reduce_max_ps(high) - lowest;
    const int is_sick = _mm512_cmp_ps_mask(sick, sick, _CMP_UNORD_Q) || !(range <= 3.4028234e38f);
    if (is_sick || range < 1e-30f) {
        *scale = is_sick ? NAN : 0.0f;
        *zero = 0;
        _mm512_storeu_si512(values, _mm512_setzero_si512());
        return;
    }
    const float inverse = 255.0f / range;
    *scale = range / 255.0f;
    const __m512i offset = _mm512_cvtps_epi32(_mm512_set1_ps(-lowest * inverse));
    *zero = _mm_cvtsi128_si32(_mm512_castsi512_si128(offset));
    for (int i = 0; i < GROUP_REGISTERS; i++) {
        __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(x[i], _mm512_set1_ps(inverse)));
        whole = _mm512_max_epi32(_mm512_add_epi32(whole, offset), _mm512_setzero_si512());
        _mm_storeu_si128((__m128i *)(values + 16 * i), _mm512_cvtusepi32_epi8(whole));
    }
}

/* Group g of row t, of which `padded` is the length in values. */
INLINE void store_group(const __m512 x[GROUP_REGISTERS], const struct quantized *q, long t, long g, long padded)
{
    const long at = t * padded + g * GROUP, of_row = t * (padded / GROUP) + g;
    if (q->values)
        quantize_group(x, q->values + at, q->scales + of_row, q->zeros + of_row);
    if (q->plain) {
        _mm512_storeu_si512(q->plain + at, to_bf16(x[0], x[1]));
        _mm512_storeu_si512(q->plain + at + 32, to_bf16(x[2], x[3]));
    }
}

/* GROUP values from x on, of which `left` are there; zeros beyond. */
INLINE void load_group(const float *x, long left, __m512 to[GROUP_REGISTERS])
{
    for (int i = 0; i < GROUP_REGISTERS; i++) {
        const long here = left - 16 * i;
        const __mmask16 some = here >= 16 ? 0xFFFF : here > 0 ? (__mmask16)((1 << here) - 1) : 0;
        to[i] = _mm512_maskz_loadu_ps(some, x + 16 * i);
    }
}

#endif
