#include "vector_template.h"

namespace orchard {
const VectorKernels* vector_neon() { return &TABLE; }
}  // namespace orchard
