#define WIDTH 16
#define TILE 8
#include "watch_template.h"

namespace orchard {
const WatchKernels* watch_avx512() { return &TABLE; }
}  // namespace orchard
