// Packed weights in a memory file that the workers of a host map read-only. A seal of the file says that it is
// complete: it can be added once, when all writes have ended.
#pragma once
#include <string>

#include "model.h"

namespace baton {

// Pack the weights that are set from now on into an empty file. `finish_sharing` completes it.
void begin_sharing(Model& model, int file, const std::string& key);

// Write the table of all weights, seal the file, and read the weights from it. Throws std::exception.
void finish_sharing(Model& model);

// Take all weights from a sealed file. Throws std::exception if the file is of another model, or has another key.
void attach_weights(Model& model, int file, const std::string& key);

}  // namespace baton
