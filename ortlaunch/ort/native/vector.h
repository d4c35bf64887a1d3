// Several floats at a time in the compiler's own vector types, as wide as the processor's registers. What is wider the
// compiler splits, and comparisons down to single numbers: exponentials then take several times as long.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace ortlaunch {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));

constexpr int64_t kBlock = 64;  // elements that share a number in the sequence of random words
constexpr int kParts = kBlock / kLanes;

inline Floats load(const float* from) {
  Floats value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

// The first `count` lanes; the others are `rest`.
inline Floats load_part(const float* from, int64_t count, float rest = 0.0f) {
  float lanes[kLanes];
  for (float& lane : lanes) lane = rest;
  std::memcpy(lanes, from, count * sizeof(float));
  return load(lanes);
}

inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof(value)); }

inline void store_part(float* to, Floats value, int64_t count) { std::memcpy(to, &value, count * sizeof(float)); }

// The first `count` lanes, which may be all.
inline Floats load_group(const float* from, int64_t count) {
  return count == kLanes ? load(from) : load_part(from, count);
}

inline void store_group(float* to, Floats value, int64_t count) {
  if (count == kLanes) {
    store(to, value);
  } else {
    store_part(to, value, count);
  }
}

// Calls `body` with the place and the number of each group of at most kLanes elements from `begin` to `end`.
template <typename Body>
inline void in_groups(int64_t begin, int64_t end, const Body& body) {
  int64_t at = begin;
  for (; at + kLanes <= end; at += kLanes) body(at, static_cast<int64_t>(kLanes));
  if (at < end) body(at, end - at);
}

inline Floats all(float value) { return Floats{} + value; }

inline float sum(Floats value) {
  float total = 0.0f;
  for (int lane = 0; lane < kLanes; ++lane) total += value[lane];
  return total;
}

inline float largest(Floats value) {
  float result = value[0];
  for (int lane = 1; lane < kLanes; ++lane) result = value[lane] > result ? value[lane] : result;
  return result;
}

// e^x to about one unit in the last place; 0 below -87, so that no denormal number appears. NaN stays NaN.
inline Floats exponential(Floats x) {
  const Floats bounded = x > 88.0f ? all(88.0f) : x;
  const Floats shifter = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const Floats shifted = bounded * 1.44269504f + shifter;
  const Floats power = shifted - shifter;
  const Floats rest = (bounded - power * 0.693145752f) - power * 1.42860677e-6f;
  Floats series = all(1.38888889e-3f);
  series = series * rest + 8.33333333e-3f;
  series = series * rest + 4.16666667e-2f;
  series = series * rest + 1.66666667e-1f;
  series = series * rest + 0.5f;
  series = series * rest + 1.0f;
  series = series * rest + 1.0f;
  Ints bits, exponent;
  std::memcpy(&bits, &series, sizeof(bits));
  std::memcpy(&exponent, &shifted, sizeof(exponent));
  bits += exponent << 23;
  Floats result;
  std::memcpy(&result, &bits, sizeof(result));
  return x < -87.0f ? Floats{} : (x != x ? x : result);
}

// The words of kLanes counters from `first` on, in out[0], out[step], out[2 * step] and out[3 * step].
inline void threefry(Words* out, int step, uint64_t seed, uint64_t row, uint32_t first) {
  const uint32_t key0= static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  const uint32_t keys[5] = {key0, key1, 0, 0, 0x1BD11BDAu ^ key0 ^ key1};
  Words a;
  for (int lane = 0; lane < kLanes; ++lane) a[lane] = first + lane + key0;
  Words b = Words{} + static_cast<uint32_t>(row) + keys[1];
  Words c = Words{} + static_cast<uint32_t>(row >> 32) + keys[2];
  Words d = Words{} + keys[3];
#define ORTLAUNCH_MIX(x, y, bits) \
  x += y;                         \
  y = ((y << bits) | (y >> (32 - bits))) ^ x;
#define ORTLAUNCH_FOUR_ROUNDS(r0, r1, r2, r3, r4, r5, r6, r7) \
  ORTLAUNCH_MIX(a, b, r0)                                     \
  ORTLAUNCH_MIX(c, d, r1)                                     \
  ORTLAUNCH_MIX(a, d, r2)                                     \
  ORTLAUNCH_MIX(c, b, r3)                                     \
  ORTLAUNCH_MIX(a, b, r4)                                     \
  ORTLAUNCH_MIX(c, d, r5)                                     \
  ORTLAUNCH_MIX(a, d, r6)                                     \
  ORTLAUNCH_MIX(c, b, r7)
#define ORTLAUNCH_KEY(round)       \
  a += keys[(round) % 5];          \
  b += keys[((round) + 1) % 5];    \
  c += keys[((round) + 2) % 5];    \
  d += keys[((round) + 3) % 5] + (round);
  ORTLAUNCH_FOUR_ROUNDS(10, 26, 11, 21, 13, 27, 23, 5)
  ORTLAUNCH_KEY(1u)
  ORTLAUNCH_FOUR_ROUNDS(6, 20, 17, 11, 25, 10, 18, 20)
  ORTLAUNCH_KEY(2u)
  ORTLAUNCH_FOUR_ROUNDS(10, 26, 11, 21, 13, 27, 23, 5)
  ORTLAUNCH_KEY(3u)
#undef ORTLAUNCH_KEY
#undef ORTLAUNCH_FOUR_ROUNDS
#undef ORTLAUNCH_MIX
  out[0] = a;
  out[step] = b;
  out[2 * step] = c;
  out[3 * step] = d;
}

// Random words that depend only on a seed and a position: Threefry-4x32 with twelve rounds (Salmon et al., 2011).
// Each call gives the 64 words of one block of one row: those of the counters from 16 * block to 16 * block + 15, first
// the first word of each, then the second and so on. They do not depend on the width of the registers.
inline void random_words(Words out[kParts], uint64_t seed, uint64_t row, uint32_t block) {
  constexpr int kSteps = kParts / 4;
  for (int step = 0; step < kSteps; ++step) {
    threefry(out + step, kSteps, seed, row, block * (kBlock / 4) + step * kLanes);
  }
}

// Dropout's factors: 0 with probability p, else 1 / (1 - p).
struct Noise {
  Noise(uint64_t seed, double p)
      : seed(seed),
        threshold(static_cast<uint32_t>(p >= 1.0 ? 4294967295.0 : p * 4294967296.0)),
        kept(p >= 1.0 ? 0.0f : static_cast<float>(1.0 / (1.0 - p))) {}

  // The 64 factors of one block of one row.
  inline void block(Floats out[kParts], uint64_t row, uint32_t number) const {
    Words words[kParts];
    random_words(words, seed, row, number);
    for (int part = 0; part < kParts; ++part) out[part] = words[part] >= threshold ? all(kept) : Floats{};
  }

  uint64_t seed;
  uint32_t threshold;
  float kept;
};

}  // namespace ortlaunch
