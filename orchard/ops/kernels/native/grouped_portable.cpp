#define WIDTH 4
#define TALL 2
#include "grouped_template.h"

namespace orchard {
const GroupedKernels* grouped_portable() { return &TABLE; }
}  // namespace orchard
