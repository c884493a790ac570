#define WIDTH 16
#define TALL 4
#include "grouped_template.h"

namespace orchard {
const GroupedKernels* grouped_avx512() { return &TABLE; }
}  // namespace orchard
