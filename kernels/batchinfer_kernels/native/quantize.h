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
    __m512 low = none, high = none;
    for (int i = 0; i < GROUP_REGISTERS; i++) {
        low = _mm512_min_ps(low, x[i]);
        high = _mm512_max_ps(high, x[i]);
    }
    __mmask16 sick = 0;
    for (int i = 0; i < GROUP_REGISTERS; i += 2)
        sick |= _mm512_cmp_ps_mask(x[i], x[i + 1], _CMP_UNORD_Q);
    /* Both at once: the lanes of `ends` are reduced to high in the lower half and -low in the upper. */
    low = _mm512_sub_ps(none, low);
    __m512 ends = _mm512_max_ps(_mm512_shuffle_f32x4(high, low, 0x44), _mm512_shuffle_f32x4(high, low, 0xEE));
    ends = _mm512_max_ps(ends, _mm512_shuffle_f32x4(ends, ends, 0xB1));
    ends = _mm512_max_ps(ends, _mm512_permute_ps(ends, 0x4E));
    ends = _mm512_max_ps(ends, _mm512_permute_ps(ends, 0xB1));
    const __m128 minus_low = _mm512_extractf32x4_ps(ends, 2), range = _mm_add_ps(_mm512_castps512_ps128(ends), minus_low);
    const float width = _mm_cvtss_f32(range);
    const int is_sick = sick || !(width <= 3.4028234e38f); /* infinite */
    if (is_sick || width < 1e-30f) {
        *scale = is_sick ? NAN : 0.0f;
        *zero = 0;
        _mm512_storeu_si512(values, _mm512_setzero_si512());
        return;
    }
    const __m128 all = _mm_set1_ps(255.0f); /* 255 / range in lane 0, range / 255 in lane 1 */
    const __m128 steps = _mm_div_ps(_mm_blend_ps(all, range, 2), _mm_blend_ps(range, all, 2));
    const __m512 inverse = _mm512_broadcastss_ps(steps);
    _mm_store_ss(scale, _mm_movehdup_ps(steps));
    const __m128i offset = _mm_cvtps_epi32(_mm_mul_ss(minus_low, steps));
    *zero = _mm_cvtsi128_si32(offset);
    __m512i whole[GROUP_REGISTERS];
    for (int i = 0; i < GROUP_REGISTERS; i++)
        whole[i] = _mm512_cvtps_epi32(_mm512_mul_ps(x[i], inverse));
    const __m512i offsets = _mm512_broadcastw_epi16(offset);
    const __m512i first = _mm512_add_epi16(_mm512_packs_epi32(whole[0], whole[1]), offsets);
    const __m512i second = _mm512_add_epi16(_mm512_packs_epi32(whole[2], whole[3]), offsets);
    /* Packing goes by quarters of a register: four values of each whole[i], in turn. */
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(values, _mm512_permutexvar_epi32(order, _mm512_packus_epi16(first, second)));
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
    if (left >= GROUP) {
        for (int i = 0; i < GROUP_REGISTERS; i++)
            to[i] = _mm512_loadu_ps(x + 16 * i);
        return;
    }
    for (int i = 0; i < GROUP_REGISTERS; i++) {
        const long here = left - 16 * i;
        const __mmask16 some = here >= 16 ? 0xFFFF : here > 0 ? (__mmask16)((1 << here) - 1) : 0;
        to[i] = _mm512_maskz_loadu_ps(some, x + 16 * i);
    }
}

#endif
