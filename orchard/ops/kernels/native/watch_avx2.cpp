#define WIDTH 8
#define TILE 4
#include "watch_template.h"

namespace orchard {
const WatchKernels* watch_avx2() { return &TABLE; }
}  // namespace orchard
