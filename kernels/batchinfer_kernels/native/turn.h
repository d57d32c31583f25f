/* Walsh-Hadamard transform of what lies in a register, the first four stages of a longer one: sums and differences of
 * lanes 1, 2, 4 and 8 apart, not normalised. */

#ifndef BATCHINFER_TURN_H
#define BATCHINFER_TURN_H

#include "bf16.h"

/* Sums in the lanes where `sign` is 1, differences where it is -1. */
#define BUTTERFLY(x, swapped, sign) x = _mm512_fmadd_ps(x, sign, swapped)

INLINE __m512 turn_lanes(__m512 x)
{
    const __m512 one = _mm512_set1_ps(1.0f), minus = _mm512_set1_ps(-1.0f);
    const __m512 sign_1 = _mm512_mask_mov_ps(one, 0xAAAA, minus), sign_2 = _mm512_mask_mov_ps(one, 0xCCCC, minus);
    const __m512 sign_4 = _mm512_mask_mov_ps(one, 0xF0F0, minus), sign_8 = _mm512_mask_mov_ps(one, 0xFF00, minus);
    BUTTERFLY(x, _mm512_permute_ps(x, 0xB1), sign_1);
    BUTTERFLY(x, _mm512_permute_ps(x, 0x4E), sign_2);
    BUTTERFLY(x, _mm512_shuffle_f32x4(x, x, 0xB1), sign_4);
    BUTTERFLY(x, _mm512_shuffle_f32x4(x, x, 0x4E), sign_8);
    return x;
}

/* And the next two stages, of four registers in a row. */
INLINE void turn_four(__m512 x[4])
{
    const __m512 a = turn_lanes(x[0]), b = turn_lanes(x[1]), c = turn_lanes(x[2]), d = turn_lanes(x[3]);
    const __m512 sum = _mm512_add_ps(a, b), difference = _mm512_sub_ps(a, b);
    const __m512 other_sum = _mm512_add_ps(c, d), other_difference = _mm512_sub_ps(c, d);
    x[0] = _mm512_add_ps(sum, other_sum);
    x[1] = _mm512_add_ps(difference, other_difference);
    x[2] = _mm512_sub_ps(sum, other_sum);
    x[3] = _mm512_sub_ps(difference, other_difference);
}

#endif
