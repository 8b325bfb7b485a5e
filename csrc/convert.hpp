// bfloat16 and float16, to float32 and back, rounding to nearest and ties to even as torch does.
#pragma once

#include <cstdint>
#include <cstring>

namespace hw {

inline uint32_t bits_of(float x) { uint32_t u; std::memcpy(&u, &x, 4); return u; }
inline float of_bits(uint32_t u) { float x; std::memcpy(&x, &u, 4); return x; }

inline float from_bfloat16(uint16_t x) { return of_bits((uint32_t)x << 16); }

inline uint16_t to_bfloat16(float x) {
    const uint32_t u = bits_of(x);
    if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)(u >> 16 | 0x40);  // NaN stays one
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

inline float from_float16(uint16_t x) {
    const uint32_t sign = (uint32_t)(x & 0x8000) << 16, rest = x & 0x7fff;
    if (rest >= 0x7c00) return of_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    if (rest >= 0x400) return of_bits(sign | ((rest << 13) + (112u << 23)));
    return of_bits(sign | bits_of((float)rest * 5.9604644775390625e-8f));  // 2^-24
}

inline uint16_t to_float16(float x) {
    const uint32_t u = bits_of(x), sign = u >> 16 & 0x8000, rest = u & 0x7fffffff;
    if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (rest < 0x38800000)  // below the smallest normal number: adding 0.5 makes the hardware round at the right place
        return (uint16_t)(sign | (bits_of(of_bits(rest) + 0.5f) - 0x3f000000));
    return (uint16_t)(sign | ((rest + 0xfff + (rest >> 13 & 1) - (112u << 23)) >> 13));
}

}  // namespace hw
