#!/bin/sh
# Run the tritonserver of the package nvidia-pytriton, without Docker: run_tritonserver.sh REPOSITORY [OPTIONS OF TRITONSERVER]
#
# It sets what an image of Triton has set: the folder of the backends, in which the Python backend has the stub of this Python; the libraries
# of Python and of the package; and this Python as the first one on the path, which the stub starts. BACKENDS is a folder for the backends,
# which may have others; a new one by default.
set -eu
repository=$1
shift
package=$(python -c 'import importlib.util; print(importlib.util.find_spec("pytriton").submodule_search_locations[0])')
python_version=$(python -c 'import sys; print(f"{sys.version_info[0]}.{sys.version_info[1]}")')
backends=${BACKENDS:-$(mktemp -d)}
cp -r "$package/tritonserver/backends/python" "$backends"
cp "$package/tritonserver/python_backend_stubs/$python_version/triton_python_backend_stub" "$backends/python"
LD_LIBRARY_PATH=$(python -c 'import sysconfig; print(sysconfig.get_config_var("LIBDIR"))'):$package/../nvidia_pytriton.libs
PATH=$(python -c 'import pathlib, sys; print(pathlib.Path(sys.executable).parent)'):$PATH
export LD_LIBRARY_PATH PATH
exec "$package/tritonserver/bin/tritonserver" --model-repository="$repository" --backend-directory="$backends" --exit-on-error=true "$@"
