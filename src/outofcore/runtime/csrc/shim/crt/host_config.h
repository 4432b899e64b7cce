// Stands in for the header of this name in CUDA's compiler, which the packages of its runtime alone do not bring along.
// To read declarations with a plain C++ compiler, nothing of it is needed.

#pragma once
