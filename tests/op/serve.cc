// A server in small: loads the op library and a SavedModel through TensorFlow's C API and runs it.  No Python.
//
//   serve LIBRARY MODEL INPUT OUTPUT N...     feeds 0, 1, .., N-1 as float32 [N], prints the result's numbers
//   INPUT and OUTPUT are names of operations
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "tensorflow/c/c_api.h"

namespace {

void Check(TF_Status* status) {
  if (TF_GetCode(status) == TF_OK) return;
  fprintf(stderr, "%s\n", TF_Message(status));
  exit(1);
}

}  // namespace

int main(int argc, char** argv) {
  TF_Status* status = TF_NewStatus();
  TF_LoadLibrary(argv[1], status);
  Check(status);
  TF_Graph* graph = TF_NewGraph();
  TF_SessionOptions* options = TF_NewSessionOptions();
  const char* tag = "serve";
  TF_Session* session = TF_LoadSessionFromSavedModel(options, nullptr, argv[2], &tag, 1, graph, nullptr, status);
  Check(status);
  TF_Output input{TF_GraphOperationByName(graph, argv[3]), 0}, output{TF_GraphOperationByName(graph, argv[4]), 0};
  for (int i = 5; i < argc; ++i) {
    int64_t n = atoll(argv[i]);
    TF_Tensor* x = TF_AllocateTensor(TF_FLOAT, &n, 1, n * sizeof(float));
    for (int64_t k = 0; k < n; ++k) static_cast<float*>(TF_TensorData(x))[k] = static_cast<float>(k);
    TF_Tensor* y = nullptr;
    TF_SessionRun(session, nullptr, &input, &x, 1, &output, &y, 1, nullptr, 0, nullptr, status);
    Check(status);
    const float* numbers = static_cast<const float*>(TF_TensorData(y));
    for (int64_t k = 0; k < TF_TensorElementCount(y); ++k) printf("%g ", static_cast<double>(numbers[k]));
    printf("\n");
    TF_DeleteTensor(x);
    TF_DeleteTensor(y);
  }
  TF_CloseSession(session, status);
  TF_DeleteSession(session, status);
  TF_DeleteSessionOptions(options);
  TF_DeleteGraph(graph);
  TF_DeleteStatus(status);
}
