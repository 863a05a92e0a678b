// Opens ONNX files with the modules of Netron, as its page does, and prints what it shows of each as JSON.
// node netron_open.mjs FOLDER_OF_NETRON FILE...

import * as fs from 'fs';
import * as path from 'path';
import * as url from 'url';

const [folder, ...files] = process.argv.slice(2);
// The modules of Netron are found beside one another, and ask for no page.
const module = (name) => import(url.pathToFileURL(path.join(folder, `${name}.js`)).href);
const base = await module('base');
const view = await module('view');

const host = {
    environment: () => null,
    event: () => {},
    exception: (error) => { throw error; },
    require: (id) => module(id.replace('./', '')),
    request: async (file, encoding, directory) => {
        const content = fs.readFileSync(path.join(directory || folder, file));
        return encoding ? content.toString(encoding) : new base.BinaryStream(content);
    },
    worker: () => { throw new Error('no worker'); }
};

const shown = [];
for (const file of files) {
    const context = {
        identifier: path.basename(file),
        stream: new base.BinaryStream(new Uint8Array(fs.readFileSync(file))),
        entries: new Map(),
        request: (name, encoding, directory) => host.request(name, encoding, directory === undefined ? path.dirname(file) : folder),
        asset: (name) => host.request(name, 'utf-8', folder),
        require: host.require,
        error: (error) => { throw error; }
    };
    const service = new view.ModelFactoryService(host);
    const model = await service.open(context);
    const graph = model.modules[0];
    shown.push({
        format: model.format,
        inputs: graph.inputs.map((argument) => [argument.name, argument.value[0].type.toString()]),
        outputs: graph.outputs.map((argument) => [argument.name, argument.value[0].type.toString()]),
        nodes: graph.nodes.map((node) => node.type.name),
        metadata: model.metadata.map((entry) => [entry.name, entry.value])
    });
}
console.log(JSON.stringify(shown));
