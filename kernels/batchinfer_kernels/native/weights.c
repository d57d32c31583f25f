/* Weights to bytes while a model is loaded: ReferenceInt8.quantize_weight, bit by bit. Called by several threads. */

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { WEIGHT_GROUP = 64 };

/* `length` numbers, at most 64, to bytes and their scale: 0 where all are too small, NaN where one is not finite. */
static void quantize_weight_group(const float *x, long length, int8_t *values, float *scale)
{
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    __m512 part[4];
    __mmask16 there[4];
    __m512i largest = _mm512_setzero_si512();
    for (int i = 0; i < 4; i++) {
        const long left = length - 16 * i;
        there[i] = left >= 16 ? 0xffff : left > 0 ? (__mmask16)((1u << left) - 1) : 0;
        part[i] = _mm512_maskz_loadu_ps(there[i], x + 16 * i);
        /* Without their sign, bits are in the order of the numbers; NaN comes after infinity. */
        largest = _mm512_max_epi32(largest, _mm512_and_si512(_mm512_castps_si512(part[i]), magnitude));
    }
    const int32_t bits = _mm512_reduce_max_epi32(largest);
    if (bits >= 0x7f800000) {
        *scale = NAN;
        memset(values, 0, length);
        return;
    }
    float size;
    memcpy(&size, &bits, sizeof size);
    size /= 127.0f;
    if (size < 1.17549435e-38f)
        size = 0; /* too coarse a number to divide by */
    *scale = size;
    const __m512 divisor = _mm512_set1_ps(size == 0 ? 1.0f : size);
    for (int i = 0; i < 4; i++) {
        const __m512i whole = _mm512_cvtps_epi32(_mm512_div_ps(part[i], divisor));
        _mm512_mask_cvtepi32_storeu_epi8(values + 16 * i, there[i], whole);
    }
}

/* rows float32 [count, width] to values int8 [count, width] and scales float32 [count, groups of 64 in a row]. */
void batchinfer_quantize_weight(const float *rows, long count, long width, int8_t *values, float *scales)
{
    const long groups = (width + WEIGHT_GROUP - 1) / WEIGHT_GROUP;
    for (long n = 0; n < count; n++, rows += width, values += width)
        for (long g = 0, at = 0; g < groups; g++, at += WEIGHT_GROUP) {
            const long left = width - at;
            quantize_weight_group(
                rows + at, left < WEIGHT_GROUP ? left : WEIGHT_GROUP, values + at, scales + n * groups + g);
        }
}
