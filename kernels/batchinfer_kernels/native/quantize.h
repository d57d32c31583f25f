/* Activations as bytes: blocks of TURNED values of one row are turned, groups of blocks have a scale (see int8.py of
 * the package). */

#ifndef BATCHINFER_QUANTIZE_H
#define BATCHINFER_QUANTIZE_H

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "turn.h"

/* ZERO is the byte that stands for 0. A group has MOST_BLOCKS blocks at most: with more of them errors grow, with fewer
 * scaling takes longer. FINER: what a step is cut into where there are fine bytes; what rounding leaves is at most half
 * of one, and so a byte. */
enum {
    TURNED = 64,
    MOST_BLOCKS = 5,
    MOST_GROUP = MOST_BLOCKS * TURNED,
    MOST = 127,
    ZERO = 128,
    FINER = 254,
    BLOCK_REGISTERS = TURNED / 16
};

static const float LEAST = 1e-30f;
static const float TURNED_FACTOR = 0.125f; /* what turning without normalising leaves to be multiplied by */

INLINE long least(long a, long b) { return a < b ? a : b; }

/* The lanes of 16 columns from `first` on that are not beyond `end`. */
INLINE __mmask16 lanes(long first, long end)
{
    const long left = end - first;
    return left >= 16 ? 0xFFFF : left > 0 ? (__mmask16)((1 << left) - 1) : 0;
}

INLINE long blocks_of(long width) { return (width + TURNED - 1) / TURNED; }

/* A row's width with whole blocks. */
INLINE long padded_to_blocks(long width) { return blocks_of(width) * TURNED; }

/* The width of a group: as few groups as can be, as even as they can be. The last may be shorter. */
INLINE long group_of(long width)
{
    const long blocks = blocks_of(width), groups = (blocks + MOST_BLOCKS - 1) / MOST_BLOCKS;
    return groups ? (blocks + groups - 1) / groups * TURNED : TURNED;
}

INLINE long groups_of(long width)
{
    const long group = group_of(width);
    return (width + group - 1) / group;
}

/* Groups of all rows: values [rows, padded], scales [rows, groups_of(padded)], fine [rows, padded], what is left of the
 * values in units of their step / FINER, plain [rows, padded] bfloat16. values, fine or plain may be NULL: then that is
 * not made; there is none of fine without values. */
struct quantized {
    uint8_t *values;
    float *scales;
    uint8_t *fine;
    uint16_t *plain;
};

/* Without their sign, bits are in the order of the numbers; NaN comes after infinity. */
INLINE __m512i larger_bits(__m512i most, __m512 x)
{
    return _mm512_max_epi32(most, _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff)));
}

enum { BITS_OF_INFINITY = 0x7f800000 };

/* Whole numbers from -128 to 127 as bytes, 128 above them. */
INLINE __m512i to_bytes(const __m512i whole[BLOCK_REGISTERS])
{
    /* Packing goes by quarters of a register: four values of each, in turn. */
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i packed =
        _mm512_packs_epi16(_mm512_packs_epi32(whole[0], whole[1]), _mm512_packs_epi32(whole[2], whole[3]));
    return _mm512_xor_si512(_mm512_permutexvar_epi32(order, packed), _mm512_set1_epi8((char)ZERO));
}

/* A group of turned numbers and the largest of them, as `larger_bits` has it by lanes. `fine` may be NULL. */
INLINE void quantize_group(const float *turned, long length, __m512i most, uint8_t *values, uint8_t *fine, float *scale)
{
    const int32_t bits = _mm512_reduce_max_epi32(most);
    const float largest = _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(bits)));
    const int is_sick = bits >= BITS_OF_INFINITY;
    if (is_sick || largest * TURNED_FACTOR < LEAST) {
        *scale = is_sick ? NAN : 0.0f;
        memset(values, ZERO, length);
        if (fine)
            memset(fine, ZERO, length);
        return;
    }
    *scale = largest * TURNED_FACTOR / MOST;
    const __m512 factor = _mm512_set1_ps(MOST / largest), finer = _mm512_set1_ps(FINER);
    for (long at = 0; at < length; at += TURNED) {
        __m512 scaled[BLOCK_REGISTERS];
        __m512i whole[BLOCK_REGISTERS];
#pragma GCC unroll 4
        for (int i = 0; i < BLOCK_REGISTERS; i++) {
            scaled[i] = _mm512_mul_ps(_mm512_load_ps(turned + at + 16 * i), factor);
            whole[i] = _mm512_cvtps_epi32(scaled[i]);
        }
        _mm512_storeu_si512(values + at, to_bytes(whole));
        if (!fine)
            continue;
#pragma GCC unroll 4
        for (int i = 0; i < BLOCK_REGISTERS; i++) {
            const __m512 left = _mm512_sub_ps(scaled[i], _mm512_cvtepi32_ps(whole[i]));
            whole[i] = _mm512_cvtps_epi32(_mm512_mul_ps(left, finer));
        }
        _mm512_storeu_si512(fine + at, to_bytes(whole));
    }
}

/* 64 values from x on, of which `left` are there; zeros beyond. */
INLINE void load_block(const float *x, long left, __m512 to[BLOCK_REGISTERS])
{
    if (left >= TURNED) {
#pragma GCC unroll 4
        for (int i = 0; i < BLOCK_REGISTERS; i++)
            to[i] = _mm512_loadu_ps(x + 16 * i);
        return;
    }
#pragma GCC unroll 4
    for (int i = 0; i < BLOCK_REGISTERS; i++)
        to[i] = _mm512_maskz_loadu_ps(lanes(16 * i, left), x + 16 * i);
}

/* Groups first .. last of row t of `to`, from the numbers of the first of them on; `left` numbers are there. Where
 * there are weights, the numbers are multiplied by `factor` and by these. */
INLINE void quantize_groups(const float *x, const float *weights, float factor, long left, long width, long first,
                            long last, const struct quantized *to, long t)
{
    float turned[MOST_GROUP] __attribute__((aligned(64)));
    const long padded = padded_to_blocks(width), length = group_of(width), row = t * padded;
    float *const scales = to->values ? to->scales + t * groups_of(width) : NULL;
    for (long g = first; g < last; g++) {
        const long start = g * length, stop = least(start + length, padded);
        __m512i most = _mm512_setzero_si512(), second = most;
        for (long at = start; at < stop; at += TURNED, x += TURNED, left -= TURNED) {
            __m512 block[BLOCK_REGISTERS], by[BLOCK_REGISTERS];
            load_block(x, left, block);
            if (weights) {
                load_block(weights, left, by);
                weights += TURNED;
#pragma GCC unroll 4
                for (int i = 0; i < BLOCK_REGISTERS; i++)
                    block[i] = _mm512_mul_ps(_mm512_mul_ps(block[i], _mm512_set1_ps(factor)), by[i]);
            }
            if (to->plain)
#pragma GCC unroll 2
                for (int i = 0; i < BLOCK_REGISTERS; i += 2)
                    _mm512_storeu_si512(to->plain + row + at + 16 * i, to_bf16(block[i], block[i + 1]));
            if (!to->values)
                continue;
            turn_four(block);
#pragma GCC unroll 4
            for (int i = 0; i < BLOCK_REGISTERS; i++)
                _mm512_store_ps(turned + at - start + 16 * i, block[i]);
            most = larger_bits(larger_bits(most, block[0]), block[1]);
            second = larger_bits(larger_bits(second, block[2]), block[3]);
        }
        if (to->values)
            quantize_group(turned, stop - start, _mm512_max_epi32(most, second), to->values + row + start,
                           to->fine ? to->fine + row + start : NULL, scales + g);
    }
}

#endif
