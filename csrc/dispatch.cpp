// Which instruction set runs: asked of the processor, once.

#include <cstring>

#include "kernel.h"

namespace hw {
namespace portable { int forward(const hw_call *); int backward(const hw_call *, const hw_gradients *); }
namespace pairs { int forward(const hw_call *); int backward(const hw_call *, const hw_gradients *); }
#if defined(HW_X86)
namespace avx2 { int forward(const hw_call *); int backward(const hw_call *, const hw_gradients *); }
namespace avx512 { int forward(const hw_call *); int backward(const hw_call *, const hw_gradients *); }
namespace avx512_bf16 { int forward(const hw_call *); int backward(const hw_call *, const hw_gradients *); }
#endif

struct entry {
    const char *name;
    int (*forward)(const hw_call *);
    int (*backward)(const hw_call *, const hw_gradients *);
    bool there;
};

static entry *entries() {
#if defined(HW_X86)
    static const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#endif
    static entry all[] = {
#if defined(HW_X86)
        {"avx512_bf16", avx512_bf16::forward, avx512_bf16::backward, wide && __builtin_cpu_supports("avx512bf16")},
        {"avx512", avx512::forward, avx512::backward, wide},
        {"avx2", avx2::forward, avx2::backward, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")},
#endif
        {"portable", portable::forward, portable::backward, true},
        {"pairs", pairs::forward, pairs::backward, true},
        {nullptr, nullptr, nullptr, false},
    };
    return all;
}
}  // namespace hw

extern "C" {

const char *hw_instructions(void) {
    static char text[64];
    if (!text[0])
        for (hw::entry *e = hw::entries(); e->name; ++e)
            if (e->there) {
                if (text[0]) std::strcat(text, " ");
                std::strcat(text, e->name);
            }
    return text;
}

int hw_forward(const hw_call *call, const char *isa) {
    for (hw::entry *e = hw::entries(); e->name; ++e)
        if (e->there && (!isa[0] || !std::strcmp(isa, e->name))) return e->forward(call);
    return HW_NO_SUCH_ISA;
}

int hw_backward(const hw_call *call, const hw_gradients *gradients, const char *isa) {
    for (hw::entry *e = hw::entries(); e->name; ++e)
        if (e->there && (!isa[0] || !std::strcmp(isa, e->name))) return e->backward(call, gradients);
    return HW_NO_SUCH_ISA;
}

int64_t hw_size(void) { return sizeof(hw_call) + sizeof(hw_gradients); }

int hw_threaded(void) {
#if defined(_OPENMP)
    return 1;
#else
    return 0;
#endif
}
}
