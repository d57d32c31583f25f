/* Activations as bytes: blocks of TURNED values of one row are turned, groups of GROUP have a scale (see int8.py of the
 * package). */

#ifndef BATCHINFER_QUANTIZE_H
#define BATCHINFER_QUANTIZE_H

#include <math.h>
#include <stddef.h>

#include "turn.h"

/* ZERO is the byte that stands for 0. */
enum { TURNED = 64, GROUP = 128, MOST = 127, ZERO = 128, BLOCK_REGISTERS = TURNED / 16, GROUP_REGISTERS = GROUP / 16 };

static const float LEAST = 1e-30f;
static const float TURNED_FACTOR = 0.125f; /* what turning without normalising leaves to be multiplied by */

/* A row's width with whole blocks, and how many groups it has, of which the last may be shorter. */
INLINE long padded_to_blocks(long width) { return (width + TURNED - 1) / TURNED * TURNED; }
INLINE long groups_of(long width) { return (width + GROUP - 1) / GROUP; }

/* Groups of all rows: values [rows, padded], scales [rows, groups_of(padded)], plain [rows, padded] bfloat16.
 * values or plain may be NULL: then that is not made. */
struct quantized {
    uint8_t *values;
    float *scales;
    uint16_t *plain;
};

/* Without their sign, bits are in the order of the numbers; NaN comes after infinity. */
INLINE __m512i larger_bits(__m512i most, __m512 x)
{
    return _mm512_max_epi32(most, _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff)));
}

enum { BITS_OF_INFINITY = 0x7f800000 };

/* x, which is turned, of which the first `count` registers are there. */
INLINE void quantize_group(const __m512 x[GROUP_REGISTERS], const int count, uint8_t *values, float *scale)
{
    __m512i most = _mm512_setzero_si512(), second = most;
#pragma GCC unroll 4
    for (int i = 0; i < count; i += 2) {
        most = larger_bits(most, x[i]);
        second = larger_bits(second, x[i + 1]);
    }
    const int32_t bits = _mm512_reduce_max_epi32(_mm512_max_epi32(most, second));
    const float largest = _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(bits)));
    const __m512i zero = _mm512_set1_epi8((char)ZERO);
    const int is_sick = bits >= BITS_OF_INFINITY;
    if (is_sick || largest * TURNED_FACTOR < LEAST) {
        *scale = is_sick ? NAN : 0.0f;
        for (int i = 0; i < count; i += BLOCK_REGISTERS)
            _mm512_storeu_si512(values + 16 * i, zero);
        return;
    }
    *scale = largest * TURNED_FACTOR / MOST;
    const __m512 factor = _mm512_set1_ps(MOST / largest);
    /* Packing goes by quarters of a register: four values of each, in turn. */
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
#pragma GCC unroll 2
    for (int i = 0; i < count; i += BLOCK_REGISTERS) {
        __m512i whole[BLOCK_REGISTERS];
#pragma GCC unroll 4
        for (int j = 0; j < BLOCK_REGISTERS; j++)
            whole[j] = _mm512_cvtps_epi32(_mm512_mul_ps(x[i + j], factor));
        const __m512i packed =
            _mm512_packs_epi16(_mm512_packs_epi32(whole[0], whole[1]), _mm512_packs_epi32(whole[2], whole[3]));
        _mm512_storeu_si512(values + 16 * i, _mm512_xor_si512(_mm512_permutexvar_epi32(order, packed), zero));
    }
}

/* `count` registers of a group. */
INLINE void store_registers(__m512 *x, const int count, uint16_t *plain, uint8_t *values, float *scale)
{
    if (plain)
#pragma GCC unroll 4
        for (int i = 0; i < count; i += 2)
            _mm512_storeu_si512(plain + 16 * i, to_bf16(x[i], x[i + 1]));
    if (values) {
#pragma GCC unroll 2
        for (int i = 0; i < count; i += BLOCK_REGISTERS)
            turn_four(x + i);
        quantize_group(x, count, values, scale);
    }
}

/* Group g of row t, of which `padded` is the length in values. x is overwritten. */
INLINE void store_group(__m512 x[GROUP_REGISTERS], const struct quantized *q, long t, long g, long padded)
{
    const long at = t * padded + g * GROUP;
    uint16_t *plain = q->plain ? q->plain + at : NULL;
    uint8_t *values = q->values ? q->values + at : NULL;
    float *scale = values ? q->scales + t * groups_of(padded) + g : NULL;
    if (padded - g * GROUP > TURNED)
        store_registers(x, GROUP_REGISTERS, plain, values, scale);
    else
        store_registers(x, BLOCK_REGISTERS, plain, values, scale);
}

/* 16 * count values from x on, of which `left` are there; zeros beyond. */
INLINE void load_registers(const float *x, long left, const int count, __m512 *to)
{
    if (left >= 16 * count) {
#pragma GCC unroll 8
        for (int i = 0; i < count; i++)
            to[i] = _mm512_loadu_ps(x + 16 * i);
        return;
    }
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) {
        const long here = left - 16 * i;
        const __mmask16 some = here >= 16 ? 0xFFFF : here > 0 ? (__mmask16)((1 << here) - 1) : 0;
        to[i] = _mm512_maskz_loadu_ps(some, x + 16 * i);
    }
}

#endif
