#define WIDTH 8
#define TALL 2
#include "grouped_template.h"

namespace orchard {
const GroupedKernels* grouped_avx2() { return &TABLE; }
}  // namespace orchard
