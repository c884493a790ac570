#define WIDTH 4
#define TILE 4
#include "watch_template.h"

namespace orchard {
const WatchKernels* watch_neon() { return &TABLE; }
}  // namespace orchard
