#include "vector_template.h"

namespace orchard {
const VectorKernels* vector_portable() { return &TABLE; }
}  // namespace orchard
