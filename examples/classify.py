"""Classify images with a served ResNet: `classify.py ADDRESS IMAGE...`.

The client reads, scales and normalizes the images. Needs `tritonclient[grpc]` and `pillow`, not torch.
"""

import sys

import numpy
import tritonclient.grpc
from PIL import Image

IMAGE_SIZE = 224  # pixels, height and width
# Mean and standard deviation of the color channels in ImageNet.
CHANNEL_MEAN = numpy.array([0.485, 0.456, 0.406], "float32")
CHANNEL_DEVIATION = numpy.array([0.229, 0.224, 0.225], "float32")


def read_image(image_path: str) -> numpy.ndarray:
    """Read the center of an image, normalized as ImageNet models expect: float32 [3, 224, 224]."""
    image = Image.open(image_path).convert("RGB")
    scale = IMAGE_SIZE / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BILINEAR)
    left, top = (image.width - IMAGE_SIZE) // 2, (image.height - IMAGE_SIZE) // 2
    center = image.crop((left, top, left + IMAGE_SIZE, top + IMAGE_SIZE))
    pixels = numpy.asarray(center, "float32") / 255
    return ((pixels - CHANNEL_MEAN) / CHANNEL_DEVIATION).transpose(2, 0, 1)


def main() -> None:
    """Print the most likely class of each image and its probability."""
    server_address, *image_paths = sys.argv[1:]
    pixels = numpy.stack([read_image(image_path) for image_path in image_paths]).astype("float32")
    pixel_input = tritonclient.grpc.InferInput("pixel_values", list(pixels.shape), "FP32").set_data_from_numpy(pixels)
    client = tritonclient.grpc.InferenceServerClient(server_address)
    logits = client.infer("resnet", [pixel_input]).as_numpy("logits")
    probabilities = numpy.exp(logits - logits.max(1, keepdims=True))
    probabilities /= probabilities.sum(1, keepdims=True)
    for image_path, class_probabilities in zip(image_paths, probabilities, strict=True):
        print(f"{image_path}: class {class_probabilities.argmax()}, {class_probabilities.max():.1%}")
    client.close()


if __name__ == "__main__":
    main()
