#define WIDTH 4
#define TALL 4
#include "grouped_template.h"

namespace orchard {
const GroupedKernels* grouped_neon() { return &TABLE; }
}  // namespace orchard
