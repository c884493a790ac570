// What this processor can run, asked once. An instruction set counts only when the operating system also saves its registers.
#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace orchard {
namespace {

#if defined(__x86_64__)
bool bit(unsigned word, int number) { return (word >> number) & 1; }

// Which register states the system saves on a switch of threads (XCR0).
uint64_t saved_states() {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

// Linux hands out the large tile registers on request only; the answer holds for every thread of the process.
bool tiles_granted() {
#if defined(__linux__)
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return false;
#endif
}

Cpu ask() {
    Cpu found{};
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return found;
    const bool fma = bit(c, 12), saves = bit(c, 27), avx = bit(c, 28), f16c = bit(c, 29);
    if (!saves || !avx) return found;
    const uint64_t states = saved_states();
    const bool ymm = (states & 0x6) == 0x6, zmm = (states & 0xe6) == 0xe6, tiles = (states & 0x60000) == 0x60000;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
    const unsigned last_leaf = a;
    found.avx2 = ymm && fma && f16c && bit(b, 5);
    found.avx512_vnni = found.avx2 && zmm && bit(b, 16) && bit(b, 17) && bit(b, 30) && bit(b, 31) && bit(c, 11);
    const bool amx = bit(d, 22) && bit(d, 24) && bit(d, 25);
    if (last_leaf >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) found.avx512_bf16 = found.avx512_vnni && bit(a, 5);
    found.amx_bf16 = amx && tiles && found.avx512_bf16 && tiles_granted();
    return found;
}
#elif defined(__aarch64__)
Cpu ask() {
    Cpu found{};
#if defined(__APPLE__)
    found.neon_dot = true;  // every Apple processor that runs macOS has it
#elif defined(__linux__)
    constexpr unsigned long DOT_PRODUCT = 1ul << 20;  // HWCAP_ASIMDDP
    found.neon_dot = (getauxval(AT_HWCAP) & DOT_PRODUCT) != 0;
#endif
    return found;
}
#else
Cpu ask() { return Cpu{}; }
#endif

}  // namespace

const Cpu& cpu() {
    static const Cpu found = ask();
    return found;
}

}  // namespace orchard
