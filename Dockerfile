# docker build -t torch-planner . && docker run --rm -u "$(id -u):$(id -g)" -v "$PWD:/work" torch-planner MODEL --vram 6GiB
FROM python:3.11-slim
COPY . /planner
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu -c /planner/constraints.txt "/planner[hf,bnb,lora]"
WORKDIR /work
ENTRYPOINT ["plan"]
