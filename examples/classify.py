"""Pictures -> classes, by a served ResNet: `classify.py URL PICTURE...`.

Reading, scaling and norming the pictures is done here, in the client. Needs `tritonclient[grpc]` and `pillow`, no torch.
"""

import sys

import numpy
import tritonclient.grpc
from PIL import Image

SIDE = 224  # pixels
MEAN, DEVIATION = numpy.float32([0.485, 0.456, 0.406]), numpy.float32([0.229, 0.224, 0.225])  # those of ImageNet


def read(path: str) -> numpy.ndarray:
    """A picture as the model takes it: the middle of it, [3, 224, 224]."""
    picture = Image.open(path).convert("RGB")
    scale = SIDE / min(picture.size)
    picture = picture.resize((round(picture.width * scale), round(picture.height * scale)), Image.Resampling.BILINEAR)
    left, top = (picture.width - SIDE) // 2, (picture.height - SIDE) // 2
    pixels = numpy.asarray(picture.crop((left, top, left + SIDE, top + SIDE)), "float32") / 255
    return ((pixels - MEAN) / DEVIATION).transpose(2, 0, 1)


def main() -> None:
    """Print the most likely class of each picture, and how likely it is."""
    url, *paths = sys.argv[1:]
    pixels = numpy.stack([read(path) for path in paths]).astype("float32")
    given = tritonclient.grpc.InferInput("pixel_values", list(pixels.shape), "FP32").set_data_from_numpy(pixels)
    client = tritonclient.grpc.InferenceServerClient(url)
    logits = client.infer("resnet", [given]).as_numpy("logits")
    likely = numpy.exp(logits - logits.max(1, keepdims=True))
    likely /= likely.sum(1, keepdims=True)
    for path, row in zip(paths, likely, strict=True):
        print(f"{path}: class {row.argmax()}, {row.max():.1%}")
    client.close()


if __name__ == "__main__":
    main()
